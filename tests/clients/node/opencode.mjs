// opencode, without a terminal.

import { agentFeatures, lines } from "./agents.mjs";
import * as m from "./features.mjs";

const config = ({ key, model, url }) => ({
  autoupdate: false,
  provider: {
    millrace: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: `${url}/v1`, apiKey: key },
      models: { [model]: {} },
    },
  },
});

async function ask(prompt, { key = m.KEY, model = m.SCRIPTED, url = m.URL, killAfter } = {}) {
  const environ = { OPENCODE_CONFIG_CONTENT: JSON.stringify(config({ key, model, url })), OPENCODE_DISABLE_MODELS_FETCH: "1" };
  const args = ["run", "--model", `millrace/${model}`, "--format", "json", prompt];
  const printed = await lines("opencode", args, environ, { killAfter });
  const events = printed.filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  const failed = events.find((event) => event.type === "error")?.error;
  if (failed) throw Object.assign(new Error(JSON.stringify(failed)), { status: failed.data?.statusCode });
  return events.findLast((event) => event.type === "text")?.part.text;
}

await m.run(agentFeatures(ask, ["opencode", "opencode_parallel"], ["error 401", "error 404", "error 503"]));
