// Codex CLI, without a terminal.

import { agentFeatures, lines } from "./agents.mjs";
import * as m from "./features.mjs";

const provider = (url) =>
  `model_providers.millrace={name="Millrace", base_url="${url}/v1", env_key="MILLRACE_API_KEY",` +
  ` wire_api="responses", request_max_retries=0, stream_max_retries=0}`;

async function ask(prompt, { key = m.KEY, model = m.SCRIPTED, url = m.URL, killAfter } = {}) {
  const options = ["--skip-git-repo-check", "--json", "-s", "danger-full-access", "-m", model];
  const args = ["exec", ...options, "-c", "model_provider=millrace", "-c", provider(url), prompt];
  const printed = await lines("codex", args, { MILLRACE_API_KEY: key }, { killAfter });
  const events = printed.filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  return events.findLast((event) => event.item?.type === "agent_message")?.item.text;
}

await m.run(agentFeatures(ask, ["codex", "codex_parallel"], ["error 401", "error 404", "error 429", "error 503"]));
