// The playground: one WebSocket per key and one request per model.
"use strict";
const form = $("[data-playground]");
if (form) {
  const data = JSON.parse($("#playground-data").textContent);
  const columns = $("[data-columns]", form);
  const shown = new Map(); // model -> column
  const running = new Map(); // request ID -> active request
  let socket = null;
  let sent = 0;

  const chosen = () => [...form.elements.model instanceof RadioNodeList ? form.elements.model : [form.elements.model]].filter((input) => input.checked && !input.disabled).map((input) => input.value);
  const number = (name) => (form.elements[name].value === "" ? undefined : Number(form.elements[name].value));
  // The value of a field with JSON; undefined if it is empty. An invalid one is an error below its field.
  const parsed = (name, isValid, hint) => {
    const field = form.elements[name];
    const text = field.value.trim();
    let value;
    let error = "";
    try {
      if (text) value = JSON.parse(text);
      if (text && !isValid(value)) error = hint;
    } catch (problem) {
      error = _("This is not JSON: %(problem)s", { problem: problem.message });
    }
    field.setAttribute("aria-invalid", String(Boolean(error)));
    setTextOf(`[data-error-of=${name}]`, error);
    if (error) throw new Error(error);
    return value;
  };
  const setTextOf = (selector, text) => ($(selector, form).textContent = text);
  const options = () => ({ max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p") });
  const tools = () => parsed("tools", (value) => Array.isArray(value) && value.every((tool) => tool?.type === "function" && tool.function?.name), _("Enter a list of tools, each with type “function” and a function with a name."));
  const schema = () => parsed("schema", (value) => value && typeof value === "object" && !Array.isArray(value), _("Enter a JSON schema, which is an object."));
  const settings = () => {
    const [called, format] = [tools(), schema()];
    return {
      ...options(),
      ...(called?.length ? { tools: called } : {}),
      ...(format ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: format } } } : {}),
    };
  };
  const messagesWith = (turns) => {
    const system = form.elements.system.value.trim();
    return [...(system ? [{ role: "system", content: system }] : []), ...turns];
  };

  // Prices are integers of nano-units per 1M tokens, so costs are integers of femto-units and need no floats.
  const cost = (model, usage) => {
    const rates = data.prices[model] || data.prices[data.served[model]];
    if (!rates) return null;
    const now = new Date();
    const clock = (timeZone) => {
      const options = { timeZone, hourCycle: "h23", weekday: "short", hour: "numeric", minute: "numeric" };
      const parts = Object.fromEntries(new Intl.DateTimeFormat("en-US", options).formatToParts(now).map(({ type, value }) => [type, value]));
      const weekday = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"].indexOf(parts.weekday);
      return [weekday, Number(parts.hour) * 60 + Number(parts.minute)];
    };
    const within = ([, , from, until, opens, closes, first, last, zone]) => {
      const [weekday, minute] = clock(zone);
      const inTokens = from <= usage.prompt_tokens && usage.prompt_tokens < until;
      return inTokens && opens <= minute && minute < closes && first <= weekday && weekday < last;
    };
    const details = usage.prompt_tokens_details;
    const tokens = {
      uncached: usage.prompt_tokens - details.cached_tokens - details.cache_write_tokens,
      cache_read: details.cached_tokens,
      cache_write_5m: details.cache_write_tokens,
      output: usage.completion_tokens,
    };
    let femto = 0n;
    for (const [component, many] of Object.entries(tokens)) {
      if (!many) continue;
      const rate = rates.find((row) => row[0] === component && within(row));
      if (!rate) return null;
      femto += BigInt(many) * BigInt(rate[1]);
    }
    return femto;
  };
  const money = (femto, places) => numbers.amount(femto, 15, places, data.symbol);

  const columnOf = (model) => {
    if (shown.has(model)) return shown.get(model);
    const card = $("#column").content.firstElementChild.cloneNode(true);
    $("h2", card).textContent = model;
    card.setAttribute("aria-label", _("Answers of %(model)s", { model }));
    $(".chat-messages", card).setAttribute("aria-label", _("Conversation with %(model)s", { model }));
    columns.append(card);
    const column = { card, turns: [] };
    shown.set(model, column);
    return column;
  };
  const setText = (column, name, text) => ($(`[data-${name}]`, column.card).textContent = text);
  const setCount = (column, name, value, note) => {
    setText(column, name, numbers.count(value));
    const all = numbers.exact(value);
    $(`[data-${name}]`, column.card).title = note || (all === numbers.count(value) ? "" : all);
  };
  const addMessage = (column, role, text) => {
    const element = document.createElement("div");
    element.className = `chat-message ${role}`;
    element.textContent = text;
    const log = $(".chat-messages", column.card);
    log.append(element);
    log.scrollTop = log.scrollHeight;
    return element;
  };
  // The parts of an assistant's message: its reasoning, which can be collapsed, the answer and the tool calls.
  const addAnswer = (column) => {
    const element = addMessage(column, "assistant", "");
    const text = document.createElement("div");
    element.append(text);
    return { element, text: "", textElement: text, reasoning: null, calls: [] };
  };
  const addReasoning = (answer, text) => {
    if (!answer.reasoning) {
      const block = (answer.reasoning = document.createElement("details"));
      block.className = "chat-reasoning";
      block.open = true;
      block.append(document.createElement("summary"), document.createElement("div"));
      block.firstChild.textContent = _("Reasoning");
      answer.element.prepend(block);
    }
    answer.reasoning.lastChild.append(text);
  };
  const addText = (answer, text) => {
    if (!answer.text && answer.reasoning) answer.reasoning.open = false;
    answer.text += text;
    answer.textElement.textContent = answer.text;
  };
  const addCall = (answer, { index, function: part }) => {
    if (!answer.calls[index]) {
      const block = document.createElement("div");
      block.className = "chat-tool-call";
      block.append(document.createElement("h3"), document.createElement("pre"));
      block.firstChild.textContent = _("Tool call: %(name)s", { name: part.name });
      answer.element.append(block);
      if (answer.reasoning) answer.reasoning.open = false;
      answer.calls[index] = { block, json: "" };
    }
    const call = answer.calls[index];
    call.json += part.arguments || "";
    call.block.lastChild.textContent = readable(call.json);
  };
  const readable = (json) => {
    try {
      return JSON.stringify(JSON.parse(json), null, 2);
    } catch {
      return json; // not complete yet
    }
  };
  const state = (column, kind, text) => {
    const badge = $("[data-state]", column.card);
    badge.className = `badge ${kind}`;
    badge.textContent = text;
  };
  const showError = (text) => {
    const banner = $("[data-error]", form);
    $("p", banner).textContent = text;
    banner.hidden = !text;
  };
  const updateButtons = () => {
    $("[data-stop]", form).disabled = !running.size;
    $("[type=submit]", form).disabled = running.size > 0;
  };

  // What to do about a response without JSON, by its status. A redirect leads to the login page.
  const advice = (response) => {
    if (response.type === "opaqueredirect") return _("You are signed out. Reload the page and sign in.");
    const { status } = response;
    const id = response.headers.get("x-request-id");
    const failed = id ? _("The server responded with status %(status)s to %(id)s.", { status, id }) : _("The server responded with status %(status)s.", { status });
    if (status === 429) return `${failed} ${_("Wait a minute, then try again.")}`;
    if (status < 500) return `${failed} ${_("Your session expired or you lack permission. Reload the page and try again.")}`;
    return `${failed} ${_("Try again. If it keeps failing, contact the operator.")}`;
  };
  const fetchToken = async (key) => {
    const body = new URLSearchParams({ key });
    const headers = { "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
    const response = await fetch(data.token_url, { method: "POST", body, headers, redirect: "manual" }).catch(() => {
      throw new Error(_("Cannot reach the console. Check your connection and try again."));
    });
    const message = await response.json().catch(() => ({})); // an error may be a page of HTML
    if (!message.playground_token) throw new Error(message.error || advice(response));
    return message.playground_token;
  };

  // Opens a WebSocket with a playground token for the selected key.
  const connect = async (key) => {
    if (socket && socket.key === key && socket.readyState === WebSocket.OPEN && Date.now() < socket.until) return socket;
    if (socket) socket.close();
    const token = await fetchToken(key);
    const opened = new WebSocket(`${location.origin.replace(/^http/, "ws")}/v1/realtime/chat`);
    opened.key = key;
    opened.until = Date.now() + 12 * 60 * 1000;
    await new Promise((ready, broken) => {
      opened.onopen = () => opened.send(JSON.stringify({ type: "auth", playground_token: token }));
      opened.onmessage = ({ data: text }) => {
        const first = JSON.parse(text);
        first.type === "ready" ? ready() : broken(new Error(first.error?.message || _("The WebSocket was rejected.")));
      };
      opened.onclose = opened.onerror = () => broken(new Error(_("Cannot reach the gateway. Try again.")));
    });
    opened.onmessage = ({ data: text }) => receive(JSON.parse(text));
    opened.onerror = null;
    opened.onclose = () => {
      for (const run of [...running.values()]) if (run.socket === opened) end(run, "bad", _("Connection lost"), _("The connection to the gateway was lost. Send the prompt again."));
    };
    return (socket = opened);
  };

  const receive = (message) => {
    const run = running.get(message.id);
    if (!run) return;
    if (message.type === "started") {
      run.id = message.request_id;
      state(run.column, "info", _("Answering"));
      showSampling(run.column, message.sampling_defaults || {});
    } else if (message.type === "chunk") {
      const [choice] = message.chunk.choices;
      run.reason = choice?.finish_reason || run.reason;
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta || {};
      if (reasoning) addReasoning(run.answer, reasoning);
      if (content) addText(run.answer, content);
      for (const call of calls || []) addCall(run.answer, call);
      if (reasoning || content || calls) {
        run.first ||= performance.now();
        const log = $(".chat-messages", run.column.card);
        log.scrollTop = log.scrollHeight;
      }
      if (message.chunk.usage) show(run, message.chunk.usage, message.chunk.model);
    } else if (message.type === "done") {
      const [kind, label, text] = endOf(run);
      end(run, kind, label, text);
    } else if (message.type === "error") {
      if (message.error.code === "cancelled") end(run, "warn", _("Stopped"));
      else end(run, "bad", message.error.code === "rate_limit_exceeded" || /budget|quota/.test(message.error.code) ? _("Rate limited") : run.id ? _("Failed") : _("Rejected"), errorText(message));
    }
  };
  // The badge and the note of a finish reason.
  const endOf = ({ reason, limit, usage }) => {
    if (reason === "stop") return ["good", _("Complete")];
    if (reason === "tool_calls") return ["good", _("Tool call")];
    if (reason !== "length") return ["warn", _("Ended: %(reason)s", { reason })];
    const reached = usage?.completion_tokens >= limit;
    const text = reached ? _("The answer reached Max output tokens (%(limit)s). Increase it, or ask for the rest.", { limit }) : _("The answer used the rest of the model’s context or of a budget. Start a new conversation, or raise the budget.");
    return ["warn", _("Cut at the output limit"), text];
  };
  // Messages of the API are English. In another language, the usual ones are replaced by a text for their code.
  const reasons = {
    rate_limit_exceeded: _("A rate limit of the key, project or organization is reached."),
    budget_exceeded: _("A budget is reached. Raise it, or wait until it resets."),
    quota_exceeded: _("A budget is reached. Raise it, or wait until it resets."),
    credit_balance_exhausted: _("The credit is used up."),
    context_length_exceeded: _("The conversation is longer than the model’s context. Start a new one."),
    model_not_found: _("This model is not served."),
    model_not_allowed: _("This key may not use this model."),
    insufficient_scope: _("This key may not run inference."),
    invalid_api_key: _("This key is not valid."),
    tenant_suspended: _("The organization is suspended."),
    model_not_priced: _("This model has no price. Contact the operator."),
    model_loading: _("The model is loading. Try again."),
    server_is_overloaded: _("The service is overloaded. Try again."),
    upstream_limit_reached: _("The provider’s rate limit is reached. Try again later."),
    upstream_error: _("The provider of this model has failed. Try again."),
    worker_lost: _("The worker stopped. Try again."),
    stream_lost: _("The worker stopped. Try again."),
    timeout: _("The request took too long."),
    first_token_timeout: _("The request took too long."),
    request_expired: _("The request took too long."),
  };
  const errorText = ({ error, retry_after }) => {
    const later = retry_after && !/try again/.test(error.message) ? ` ${_("Try again in %(seconds)s s.", { seconds: Math.ceil(retry_after) })}` : "";
    return `${(window.TEXTS && reasons[error.code]) || error.message}${later} (${error.code})`;
  };

  // The sampling parameters that the request took from the model's deployment.
  const showSampling = (column, defaults) => {
    const text = Object.entries(defaults).map(([name, value]) => `${name}=${value}`).join(", ");
    setText(column, "sampling", text);
    $("[data-sampling]", column.card).parentElement.hidden = !text;
  };

  const show = (run, usage, model) => {
    run.usage = usage;
    const { column, first, began } = run;
    const now = performance.now();
    if (first) setText(column, "ttft", numbers.duration(Math.round((first - began) * 1000)));
    if (first && usage.completion_tokens > 1 && now > first) setText(column, "speed", numbers.fixed(Math.round(((usage.completion_tokens - 1) / (now - first)) * 10000), 1));
    const { cached_tokens: cached, cache_write_tokens: written } = usage.prompt_tokens_details;
    setCount(column, "input", usage.prompt_tokens - cached, written && _("%(count)s of them written to the cache", { count: numbers.count(written) }));
    setCount(column, "cached", cached);
    const reasoning = usage.completion_tokens_details?.reasoning_tokens;
    setCount(column, "output", usage.completion_tokens, reasoning && _("%(count)s of them reasoning", { count: numbers.count(reasoning) }));
    const femto = cost(model, usage) ?? cost(run.model, usage);
    setText(column, "cost-label", _("Cost so far"));
    setText(column, "cost", femto === null ? _("no price") : money(femto, 6));
    if (femto !== null) $("[data-cost]", column.card).title = money(femto, 15);
  };

  const end = (run, kind, label, text) => {
    running.delete(run.name);
    state(run.column, kind, label);
    setText(run.column, "cost-label", _("Cost"));
    const { answer } = run;
    const isEmpty = !answer.text && !answer.reasoning && !answer.calls.length;
    if (answer.text) run.column.turns.push({ role: "assistant", content: answer.text });
    else run.column.turns.pop(); // without an answer it is not part of the next prompt
    if (isEmpty) answer.element.remove();
    if (text) {
      if (isEmpty) form.elements.prompt.value ||= run.prompt; // so that it can be sent again
      const note = addMessage(run.column, kind === "bad" ? "field-error" : "text-muted", text);
      if (/budget|quota|limit/.test(text)) {
        const go = document.createElement("a");
        go.className = "link";
        go.href = data.budgets;
        go.textContent = _("Budgets and quotas");
        note.append(" ", go);
      }
    }
    if (kind === "bad") {
      const again = document.createElement("button");
      again.type = "button";
      again.className = "button";
      again.textContent = _("Try again");
      again.addEventListener("click", () => retry(run, again));
      $(".chat-messages", run.column.card).append(again);
    }
    if (run.id) {
      const go = document.createElement("a");
      go.className = "mono text-muted";
      go.href = data.request.replace("-id-", run.id);
      go.textContent = run.id;
      const log = $(".chat-messages", run.column.card);
      log.append(go);
      log.scrollTop = log.scrollHeight;
    }
    const used = run.usage ? `, ${_("%(count)s tokens", { count: numbers.count(run.usage.completion_tokens) })}, ${$("[data-cost]", run.column.card).textContent}` : "";
    $("[data-status]", form).textContent = `${run.model}: ${label}${used}. ${text || ""}`;
    updateButtons();
  };

  const start = (opened, model, prompt, given) => {
    const column = columnOf(model);
    column.turns.push({ role: "user", content: prompt });
    addMessage(column, "user", prompt);
    for (const name of ["ttft", "speed", "input", "cached", "output", "cost"]) setText(column, name, "–");
    state(column, "", _("Waiting"));
    const name = `${++sent}`;
    running.set(name, { name, model, prompt, column, limit: number("max_tokens"), socket: opened, answer: addAnswer(column), began: performance.now() });
    const stream = { include_usage: true, continuous_usage_stats: true };
    opened.send(JSON.stringify({ id: name, model, messages: messagesWith(column.turns), stream_options: stream, ...given }));
  };
  // Sends the prompt of a failed request again, to its model only.
  const retry = async (run, button) => {
    if (running.size) return;
    button.disabled = true;
    try {
      const given = settings();
      const opened = await connect(form.elements.key.value);
      button.remove();
      if (form.elements.prompt.value.trim() === run.prompt) form.elements.prompt.value = "";
      if (run.column.turns.at(-1)?.role === "assistant") run.column.turns.splice(-2); // an answer that broke off
      start(opened, run.model, run.prompt, given);
      updateButtons();
    } catch (problem) {
      button.disabled = false;
      showError(problem.message);
    }
  };
  const send = async () => {
    const models = chosen();
    const prompt = form.elements.prompt.value.trim();
    if (running.size || !prompt) return;
    if (!models.length) return showError(_("Choose a model."));
    showError("");
    let opened;
    let given;
    try {
      given = settings();
      opened = await connect(form.elements.key.value);
    } catch (problem) {
      $("[aria-invalid=true]", form)?.focus();
      return showError(problem.message);
    }
    for (const [model, column] of shown) column.card.hidden = !models.includes(model);
    for (const model of models) start(opened, model, prompt, given);
    remember();
    form.elements.prompt.value = "";
    updateButtons();
    code();
  };
  const stop = () => {
    for (const run of running.values()) run.socket.send(JSON.stringify({ type: "cancel", id: run.name }));
  };

  // The same request in four languages. Invalid JSON keeps the last code.
  const pythonOf = (value, indent) => {
    const inner = `${indent}    `;
    if (value === null) return "None";
    if (typeof value === "boolean") return value ? "True" : "False";
    if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${inner}${pythonOf(one, inner)},\n`).join("")}${indent}]` : "[]";
    if (typeof value === "object") return `{\n${Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${pythonOf(one, inner)},\n`).join("")}${indent}}`;
    return JSON.stringify(value);
  };
  const argumentsOf = (body) => Object.entries(body).filter(([, value]) => value !== undefined).map(([name, value]) => `    ${name}=${pythonOf(value, "    ")},\n`).join("");
  const code = () => {
    let given;
    try {
      given = settings();
    } catch {
      return;
    }
    const model = chosen()[0] || "";
    const turns = (shown.get(model)?.turns || []).slice();
    const prompt = form.elements.prompt.value.trim();
    if (prompt || !turns.length) turns.push({ role: "user", content: prompt || "Hello!" });
    else while (turns.length > 1 && turns.at(-1).role === "assistant") turns.pop();
    const body = { model, messages: messagesWith(turns), ...given };
    const json = JSON.stringify(body, null, 2);
    const key = form.elements.key.selectedOptions[0].dataset;
    const comment = `MILLRACE_API_KEY: ${key.prefix}… (${key.name})`;
    const write = (name, text) => setTextOf(`#code-${name} code`, text);
    write("curl", `# ${comment}\ncurl ${data.base_url}/v1/chat/completions \\\n  -H "Authorization: Bearer $MILLRACE_API_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d '${json.replaceAll("'", "'\\''")}'`);
    write("python", `import os\n\nfrom openai import OpenAI\n\n# ${comment}\nclient = OpenAI(base_url="${data.base_url}/v1", api_key=os.environ["MILLRACE_API_KEY"])\nresponse = client.chat.completions.create(\n${argumentsOf(body)})\nprint(response.choices[0].message.content)`);
    write("node", `import OpenAI from "openai";\n\n// ${comment}\nconst client = new OpenAI({ baseURL: "${data.base_url}/v1", apiKey: process.env.MILLRACE_API_KEY });\nconst response = await client.chat.completions.create(${json});\nconsole.log(response.choices[0].message.content);`);
    const { response_format: format, tools: called, max_tokens: most, ...rest } = given;
    const system = form.elements.system.value.trim();
    const messages = {
      model,
      max_tokens: most ?? 1024,
      ...(system ? { system } : {}),
      messages: turns,
      ...rest,
      ...(called ? { tools: called.map(({ function: tool }) => ({ name: tool.name, ...(tool.description ? { description: tool.description } : {}), input_schema: tool.parameters || { type: "object" } })) } : {}),
    };
    write("anthropic", `import os\n\nfrom anthropic import Anthropic\n\n# ${comment}\n${format ? "# The JSON schema of this request is not part of Anthropic’s API.\n" : ""}client = Anthropic(base_url="${data.base_url}", api_key=os.environ["MILLRACE_API_KEY"])\nmessage = client.messages.create(\n${argumentsOf(messages)})\nprint(message.content[0].text)`);
  };

  // Links and history have the same fields. A link has them behind #, which browsers do not send to servers.
  const FIELDS = ["system", "prompt", "max_tokens", "temperature", "top_p", "tools", "schema"];
  const MAX_HISTORY = 20;
  const store = `playground ${location.pathname}`;
  const fields = () => Object.fromEntries(FIELDS.map((name) => [name, form.elements[name].value]).filter(([, value]) => value));
  const fill = (values) => {
    for (const name of FIELDS) form.elements[name].value = typeof values[name] === "string" ? values[name] : "";
    if (values.tools || values.schema) $("[data-advanced]", form).open = true;
    code();
  };
  const history = () => {
    try {
      const found = JSON.parse(localStorage.getItem(store) || "[]");
      return Array.isArray(found) ? found : [];
    } catch {
      return [];
    }
  };
  const showHistory = () => {
    const list = $("[data-history]", form);
    const found = history();
    list.replaceChildren(...found.map((values) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "history-entry";
      button.textContent = values.prompt;
      button.addEventListener("click", () => { fill(values); list.closest("details").open = false; form.elements.prompt.focus(); });
      item.append(button);
      return item;
    }));
    $("[data-history-menu]", form).hidden = !found.length;
  };
  const remember = () => {
    const values = fields();
    const others = history().filter((one) => JSON.stringify(one) !== JSON.stringify(values));
    try {
      localStorage.setItem(store, JSON.stringify([values, ...others].slice(0, MAX_HISTORY)));
    } catch {
      return; // the browser stores nothing
    }
    showHistory();
  };
  const linkOf = () => {
    const url = new URL(location);
    url.searchParams.delete("request");
    url.hash = btoa(String.fromCharCode(...new TextEncoder().encode(JSON.stringify(fields())))).replaceAll("+", "-").replaceAll("/", "_");
    return url.href;
  };
  const readLink = () => {
    if (location.hash.length < 2) return;
    try {
      const text = atob(location.hash.slice(1).replaceAll("-", "+").replaceAll("_", "/"));
      fill(JSON.parse(new TextDecoder().decode(Uint8Array.from(text, (letter) => letter.charCodeAt(0)))));
    } catch {
      showError(_("This link is not complete. Copy it again."));
    }
  };
  const updateChoices = () => {
    const allowed = form.elements.key.selectedOptions[0].dataset.models.split(" ").filter(Boolean);
    const boxes = [...form.querySelectorAll("[name=model]")];
    const full = boxes.filter((box) => box.checked).length >= 4;
    for (const box of boxes) box.disabled = "unusable" in box.dataset || (allowed.length > 0 && !allowed.includes(box.value)) || (full && !box.checked);
    const address = new URL(location);
    address.searchParams.set("key", form.elements.key.value);
    address.searchParams.set("model", chosen().join(","));
    window.history.replaceState(null, "", address);
  };

  on("submit", (event) => { event.preventDefault(); send(); }, form);
  on("input", code, form);
  on("change", () => { updateChoices(); code(); }, form);
  on("click", stop, $("[data-stop]", form));
  on("change", ({ target }) => {
    const preset = target.selectedOptions[0].dataset;
    if (preset.temperature === undefined) return;
    form.elements.temperature.value = preset.temperature;
    form.elements.top_p.value = preset.topP;
  }, form.elements.preset);
  on("click", async () => {
    await navigator.clipboard.writeText(linkOf());
    setTextOf("[data-status]", _("Link copied"));
    const label = $("[data-share] span", form);
    const before = label.textContent;
    label.textContent = _("Link copied");
    setTimeout(() => { label.textContent = before; }, 2000);
  }, $("[data-share]", form));
  on("click", () => { localStorage.removeItem(store); showHistory(); }, $("[data-forget]", form));
  on("click", () => { stop(); shown.clear(); columns.replaceChildren(); showError(""); code(); form.elements.prompt.focus(); }, $("[data-new]", form));
  on("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(event.target)) { event.preventDefault(); form.requestSubmit(); }
    if (event.key === "Escape" && !event.defaultPrevented && running.size && !$("dialog[open]")) { event.preventDefault(); stop(); }
  });
  on("pagehide", () => socket?.close(), window);
  updateChoices();
  code();
  showHistory();
  readLink();
}
