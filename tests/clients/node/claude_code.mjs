// Claude Code, without a terminal.

import { agentFeatures, lines } from "./agents.mjs";
import * as m from "./features.mjs";

async function ask(prompt, { key = m.KEY, model = m.SCRIPTED, url = m.URL, killAfter } = {}) {
  const environ = {
    ANTHROPIC_BASE_URL: url,
    ANTHROPIC_AUTH_TOKEN: key,
    ANTHROPIC_MODEL: model,
    ANTHROPIC_SMALL_FAST_MODEL: model,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    CLAUDE_CODE_MAX_RETRIES: "0",
  };
  const args = ["-p", prompt, "--output-format", "json", "--allowedTools", "Bash"];
  const printed = await lines("claude", args, environ, { killAfter });
  const line = printed.find((each) => each.startsWith("{"));
  return line && JSON.parse(line).result;
}

await m.run(agentFeatures(ask, ["claude", "claude_parallel"], ["error 401", "error 404", "error 429", "error 503"]));
