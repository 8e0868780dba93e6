// Qwen Code, without a terminal.

import { agentFeatures, lines } from "./agents.mjs";
import * as m from "./features.mjs";

async function ask(prompt, { key = m.KEY, model = m.SCRIPTED, url = m.URL, killAfter } = {}) {
  const connection = ["--auth-type", "openai", "--openai-api-key", key, "--openai-base-url", `${url}/v1`, "--model", model];
  const args = [...connection, "--yolo", "--output-format", "json", "--prompt", prompt];
  const printed = await lines("qwen", args, {}, { killAfter });
  const line = printed.find((each) => each.startsWith("[{"));
  return line && JSON.parse(line).findLast((event) => event.type === "result")?.result;
}

await m.run(agentFeatures(ask, ["qwen", "qwen_parallel"], ["error 401", "error 404"]));
