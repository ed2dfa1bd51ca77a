// A call of the playground as curl, Python and grpcurl.
import { prefix } from "./page.js";

const GRPC = { "/embed": "Embed", "/embed_sparse": "EmbedSparse", "/embed_all": "EmbedAll", "/predict": "Predict", "/rerank": "Rerank", "/tokenize": "Tokenize" };
const PYTHON = { "/embed": "embed", "/embed_sparse": "embed_sparse", "/embed_all": "embed_all", "/predict": "predict", "/tokenize": "tokenize" };
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** `items` are the entries of the call; the data of file number n is `@n` in `body`. */
export function callsFor(mode, instance, { route, body }, items, { grpc, tls, keys }) {
  const texts = items.filter((item) => !item.file).map((item) => item.text), files = items.filter((item) => item.file);
  const hasRanked = files.length && mode === "rerank";
  return {
    curl: curl(instance, route, body, items, keys),
    python: hasRanked ? "# Files are ranked over HTTP: as curl does" : python(instance, route, body, texts, files, { grpc, keys }),
    grpcurl: !grpc ? "gRPC is off (grpc_enabled = false)" : files.length ? "# Files go over gRPC in tables of Arrow: as Python does" : grpcurl(instance, route, body, texts, { grpc, tls, keys }),
  };
}

function curl(instance, route, body, items, keys) {
  const lines = [`curl ${location.origin}${prefix}/instances/${instance.name}${route}`], text = JSON.stringify(body);
  if (keys) lines.push('-H "Authorization: Bearer $TEIMGR_API_KEY"');
  lines.push("-H 'Content-Type: application/json'");
  if (!items.some((item) => item.file)) return [...lines, `-d ${quoted(text)}`].join(" \\\n    ");
  // In a here-document the shell puts each file in its place; what else it would replace is escaped.
  const filled = text.replace(/[\\$`]/g, "\\$&").replace(/"data":"@(\d+)"/g, (_, at) => `"data":"$(base64 -w0 ${quoted(items[at].name)})"`);
  return `${[...lines, "--data-binary @- <<END"].join(" \\\n    ")}\n${filled}\nEND`;
}

function python(instance, route, body, texts, files, { grpc, keys }) {
  const string = JSON.stringify, list = (all) => `[\n${all.map((text) => `    ${string(text)},`).join("\n")}\n]`;
  const address = [string(location.origin + prefix), string(`${location.protocol}//${grpc ?? "localhost:9001"}`)];
  if (keys) address.push('api_key=os.environ["TEIMGR_API_KEY"]');
  const imports = [keys && "import os", files.length && "from pathlib import Path"].filter(Boolean), named = `instance=${string(instance.name)}`;
  const call = {
    "/rerank": `client.rerank(${string(body.query ?? "")}, texts, ${named})`,
    "/tokenize": `[client.tokenize(text, ${named}) for text in texts]`,
  }[route] ?? `client.${PYTHON[route]}(texts, ${named})`;
  const begin = (imports.length ? `${imports.join("\n")}\n\n` : "") + (files.length ? "import pyarrow as pa\n" : "") + "from teimgr.client import Client\n\n";
  const end = (what) => `with Client(${address.join(", ")}) as client:\n    print(${what})`;
  if (!files.length) return `${begin}texts = ${list(texts)}\n${end(call)}`;
  // A row of a table has a text or a file.
  const read = "*(Path(name).read_bytes() for name in files)", column = string(files[0].kind);
  const rows = texts.length ? `{"text": [*texts, *[None] * len(files)], ${column}: [*[None] * len(texts), ${read}]}` : `{${column}: [${read}]}`;
  return `${begin}${texts.length ? `texts = ${list(texts)}\n` : ""}files = ${list(files.map((file) => file.name))}\nrows = pa.table(${rows})\n${end(`client.infer(rows, ${named})`)}`;
}

function grpcurl(instance, route, body, texts, { grpc, tls, keys }) {
  const target = { instance_name: instance.name };
  const requests = route === "/rerank"
    ? [{ target, request: { query: body.query, texts, truncate: true } }]
    : texts.map((inputs) => ({ target, request: { inputs, ...(route === "/tokenize" ? { add_special_tokens: true } : { truncate: true }) } }));
  // A call of several texts is a stream of requests.
  const method = GRPC[route] + (requests.length > 1 ? "Stream" : "");
  const lines = [`grpcurl ${tls ? "-cacert ca.pem" : "-plaintext"}`];
  if (keys) lines.push('-H "Authorization: Bearer $TEIMGR_API_KEY"');
  lines.push(`-d ${quoted(requests.map((each) => JSON.stringify(each)).join("\n"))}`, `${grpc} tei_multiplexer.v1.TeiMultiplexer/${method}`);
  return lines.join(" \\\n    ");
}
