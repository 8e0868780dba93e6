// Continue's command line, without a terminal.

import { writeFileSync } from "node:fs";

import { agentFeatures, lines } from "./agents.mjs";
import * as m from "./features.mjs";

async function ask(prompt, { key = m.KEY, model = m.SCRIPTED, url = m.URL, killAfter } = {}) {
  const settings = { name: model, provider: "openai", model, apiBase: `${url}/v1`, apiKey: key, capabilities: ["tool_use"] };
  // JSON is YAML, too.
  writeFileSync("config.yaml", JSON.stringify({ name: "tests", version: "0.0.1", schema: "v1", models: [settings] }));
  const args = ["--print", prompt, "--config", "config.yaml", "--auto"];
  const printed = await lines("cn", args, { CONTINUE_TELEMETRY_ENABLED: "0" }, { killAfter });
  return printed.join("\n").trim();
}

await m.run(agentFeatures(ask, ["claude", "claude_parallel"], ["error 401", "error 404"]));
