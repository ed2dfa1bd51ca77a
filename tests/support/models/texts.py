"""The words that the tiny tokenizers are trained on, and texts to embed with them."""

CORPUS = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix a potion of zinc and jade.",
    "An embedding is a point in space: texts that mean the same lie near one another, whatever their words.",
    "Rain fell on the harbour all night; by morning the boats lay in fog, their lamps still lit.",
    "def add(a, b): return a + b  # 1234567890 !?()[]{}<>@&%$",
    "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too. Καλημέρα κόσμε, привет мир.",
    "How long does a query wait while a bulk job runs? Not longer than one small batch.",
)

# The words of a yes-or-no reranker's template, so that it takes few of a tiny model's tokens.
INSTRUCTIONS = (
    "system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. ",
    'Note that the answer can only be "yes" or "no".',
    "user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "<Document>: assistant Find what answers the query",
) * 4

JUDGEMENTS = (
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant. query: document: Relevance:",
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document",
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment",
    "(0 for not relevant, 1 for relevant). Given a query A and a passage B, determine whether the passage contains",
    "an answer to the query by providing a prediction of either 'Yes' or 'No'.",
) * 4

# Lengths from one token to past the limit, several of them equal.
TEXTS = (
    "fog",
    "dog",
    "The quick brown fox",
    "An embedding is a point in space: texts that mean the same lie near one another.",
    "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too.",
    "How long does a query wait while a bulk job runs?",
    "rain " * 30,
    "The lazy dog sleeps while the boats lie in fog and the lamps are still lit. " * 9,
    "a b c",
    "x y z",
)

# Queries and documents: short against long, long against short, both past the limit, equal lengths.
PAIRS = (
    ("fog", "dog"),
    ("Where do the boats lie?", "Rain fell on the harbour all night; by morning the boats lay in fog."),
    ("How long does a query wait while a bulk job runs?", "Not longer than one small batch."),
    ("The quick brown fox", TEXTS[7]),
    (TEXTS[7], "a b c"),
    (TEXTS[6], TEXTS[7]),
    ("a b c", "x y z"),
    ("Zürich", "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too."),
)
