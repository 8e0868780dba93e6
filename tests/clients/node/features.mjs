// What the client programs share: the features' names, the platform's addresses, and the report on each feature.
// A program calls `run` with a function for each feature that its client offers. `run` prints one JSON line per feature.

export const URL = process.env.MATRIX_URL;
export const OPENAI_URL = `${URL}/v1`;
export const KEY = process.env.MATRIX_KEY;
export const LIMITED_KEY = process.env.MATRIX_LIMITED_KEY; // its limit is exhausted
export const MODEL = process.env.MATRIX_MODEL; // answers by itself
export const SCRIPTED = process.env.MATRIX_SCRIPTED_MODEL; // plays scripts
export const EMBEDDING_MODEL = process.env.MATRIX_EMBEDDING_MODEL;
export const HELLO = "Tell me a long story about a river.";
export const REASONING = ["Paris is in France.", "Paris is the capital of France."]; // of the script `reasoning`
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const CITY = { name: "Paris", population: 2100000 }; // of the script `city`
const FEATURE_MILLISECONDS = 60_000;

// Return a prompt that the scripted model answers with the script.
export const script = (name) => `Answer by the script [[${name}]].`;

export const user = (text) => [{ role: "user", content: text }];

export function equal(found, expected) {
  const [a, b] = [JSON.stringify(found), JSON.stringify(expected)];
  if (a !== b) throw new Error(`${a} is not ${b}`);
}

export function check(value, message) {
  if (!value) throw new Error(message);
}

// Return a feature for each class of errors. `call` takes key, model, prompt and maxTokens, and sends them.
export function errors(call) {
  const usual = { key: KEY, model: SCRIPTED, prompt: script("plain"), maxTokens: 20 };
  const changes = {
    400: { maxTokens: 1e7 },
    401: { key: "sk-mr-wrong" },
    404: { model: "missing" },
    429: { key: LIMITED_KEY },
    503: { prompt: script("overloaded") },
  };
  const accepted = { 503: [503, 529] }; // 529 is Anthropic's status for an overloaded server
  const feature = (status) => async () => {
    let error;
    try {
      await call({ ...usual, ...changes[status] });
    } catch (exc) {
      error = exc;
    }
    check(error, "no error");
    for (let each = error; each; each = each.cause ?? each.lastError) {
      if ((accepted[status] ?? [Number(status)]).includes(each.status ?? each.statusCode)) return;
    }
    throw error;
  };
  return Object.fromEntries(Object.keys(changes).map((status) => [`error ${status}`, feature(status)]));
}

// Run the features, and print the result of each.
export async function run(features) {
  const only = process.argv.slice(2);
  for (const [name, feature] of Object.entries(features)) {
    if (only.length && !only.includes(name)) continue;
    let failed = null;
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error("it took too long")), FEATURE_MILLISECONDS);
    });
    try {
      await Promise.race([feature(), late]);
    } catch (error) {
      console.error(error);
      failed = String(error).slice(0, 2000);
    }
    clearTimeout(timer);
    console.log(`\n${JSON.stringify({ feature: name, failed })}`); // after unfinished lines
  }
  process.exit(0);
}
