// A call of the playground as curl, Python and grpcurl.
import { prefix } from "./page.js";

const GRPC = { "/embed": "Embed", "/embed_sparse": "EmbedSparse", "/embed_all": "EmbedAll", "/predict": "Predict", "/rerank": "Rerank", "/tokenize": "Tokenize" };
const PYTHON = { "/embed": "embed", "/embed_sparse": "embed_sparse", "/embed_all": "embed_all", "/predict": "predict", "/tokenize": "tokenize" };
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function callsFor(mode, instance, { route, body }, { grpc, tls, keys }) {
  const texts = mode === "rerank" ? body.texts : mode === "classify" ? body.inputs.map(([text]) => text) : body.inputs;
  return {
    curl: curl(instance, route, body, keys),
    python: python(instance, route, body, texts, { grpc, keys }),
    grpcurl: grpc ? grpcurl(instance, route, body, texts, { grpc, tls, keys }) : "gRPC is off (grpc_enabled = false)",
  };
}

function curl(instance, route, body, keys) {
  const lines = [`curl ${location.origin}${prefix}/instances/${instance.name}${route}`];
  if (keys) lines.push('-H "Authorization: Bearer $TEIMGR_API_KEY"');
  lines.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n    ");
}

function python(instance, route, body, texts, { grpc, keys }) {
  const string = JSON.stringify, list = `[\n${texts.map((text) => `    ${string(text)},`).join("\n")}\n]`;
  const address = [string(location.origin + prefix), string(`${location.protocol}//${grpc ?? "localhost:9001"}`)];
  if (keys) address.push('api_key=os.environ["TEIMGR_API_KEY"]');
  const call = {
    "/rerank": `client.rerank(${string(body.query ?? "")}, texts, instance=${string(instance.name)})`,
    "/tokenize": `[client.tokenize(text, instance=${string(instance.name)}) for text in texts]`,
  }[route] ?? `client.${PYTHON[route]}(texts, instance=${string(instance.name)})`;
  return `${keys ? "import os\n\n" : ""}from teimgr.client import Client\n\ntexts = ${list}\nwith Client(${address.join(", ")}) as client:\n    print(${call})`;
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
