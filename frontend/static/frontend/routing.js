"use strict";
// The builder of a policy. The page has one object, `policy`: the rules show it as cards, and the tab JSON as text. Each
// edit changes the object and its text, and nothing else on the page is replaced. The server checks the text.
(() => {
  const [body, list, builder, checkField] = ["id_body", "rule-list", "builder", "policy-check"].map((id) => document.getElementById(id));
  const data = JSON.parse($("#builder-data").textContent);
  const places = new Map(); // element -> function that returns its path in the policy
  const place = (element, path) => { places.set(element, path); return element; };
  let policy = {};
  let cards = [];
  let edits = 0;

  const INNERMOST = /([\[{])\n\s*((?:"(?:[^"\\]|\\.)*"|[^\[\]{}"])*?)\n\s*([\]}])/g;
  const pretty = (value) => JSON.stringify(value, null, 2).replace(INNERMOST, (_all, open, inner, close) => open + inner.replace(/\s*\n\s*/g, " ") + close);
  const edited = () => {
    edits += 1;
    delete policy.models;
    policy.rules = cards.map(({ rule }) => rule);
    for (const card of cards) fields.writeConditions(card.rule, card.conditions);
    body.value = pretty(policy);
    describe();
    htmx.trigger(checkField, "edited");
  };
  const fields = ruleFields({ data, edited: () => edited(), place });
  const indexOf = (rule) => cards.findIndex((card) => card.rule === rule);

  // Targets: those with a weight, and those that are only fallbacks.
  const isFallback = (target) => target.weight === 0;
  const targetRow = (card, target) => {
    const isOnlyFallback = isFallback(target); // also while 0 is typed as a weight
    const row = fields.copy("target-template");
    const [weight, share, up] = [".rule-weight input", "[data-share]", "[data-do=up]"].map((part) => $(part, row));
    const path = () => `rules[${indexOf(card.rule)}].targets[${card.rule.targets.indexOf(target)}]`;
    const others = () => card.rule.targets.filter((other) => other !== target).map(({ model }) => model);
    const menu = fields.picker({ value: () => target.model, label: _("Model"), path: () => `${path()}.model`, taken: others, choose: (name) => { target.model = name; } });
    row.prepend(menu);
    place(weight, () => `${path()}.weight`);
    weight.value = target.weight ?? 1;
    if (isOnlyFallback) weight.parentElement.remove();
    on("input", () => {
      target.weight = fields.read(weight.value);
      if (target.weight === 1) delete target.weight;
      edited();
    }, weight);
    const peers = () => card.targets.filter((other) => other.isOnlyFallback === isOnlyFallback);
    up.act = () => {
      const before = peers()[peers().findIndex((other) => other.target === target) - 1];
      if (!before) return;
      moveIn(card.rule.targets, target, before.target);
      moveIn(card.targets, item, before);
      before.row.before(row);
      edited();
      up.disabled ? $("summary", row).focus() : up.focus();
    };
    $("[data-do=remove]", row).act = () => {
      const next = row.nextElementSibling ?? row.previousElementSibling;
      card.rule.targets.splice(card.rule.targets.indexOf(target), 1);
      card.targets.splice(card.targets.indexOf(item), 1);
      row.remove();
      edited();
      (next ? $("[data-do=remove]", next) : card.adders[isOnlyFallback ? "fallback" : "target"]).focus();
    };
    const item = { target, row, menu, isOnlyFallback, describe: () => {
      const isWeighted = (card.rule.strategy ?? "weighted") === "weighted" && !isOnlyFallback;
      const weights = card.rule.targets.map((other) => Number(other.weight ?? 1) || 0);
      const total = weights.reduce((sum, each) => sum + each, 0);
      weight.parentElement.hidden = !isWeighted;
      share.hidden = !isWeighted;
      share.textContent = total ? `${fields.formatValue(Math.round((1000 * (Number(target.weight ?? 1) || 0)) / total) / 10)}%` : "–";
      up.hidden = !isOnlyFallback && card.rule.strategy !== "ordered";
      up.disabled = peers()[0] === item;
    } };
    (isOnlyFallback ? card.fallbackList : card.targetList).append(row);
    return item;
  };
  const moveIn = (items, item, before) => {
    items.splice(items.indexOf(item), 1);
    items.splice(items.indexOf(before), 0, item);
  };
  const addTarget = (card, weight) => {
    const used = card.rule.targets.map(({ model }) => model);
    const target = { model: data.models.find(({ name }) => !used.includes(name))?.name ?? "", ...weight };
    card.rule.targets.push(target);
    const item = targetRow(card, target);
    card.targets.push(item);
    edited();
    fields.open(item.menu);
  };

  // Checks of the answer, after which the next target answers.
  const answerChecks = (card) => {
    const menu = $("[data-checks]", card.row);
    const [summary, pattern, escalations] = ["summary", "[data-pattern]", "[data-escalations]"].map((part) => $(part, menu));
    const inputs = [...menu.querySelectorAll("[type=checkbox]")];
    const path = () => `rules[${indexOf(card.rule)}].escalate`;
    for (const [element, end] of [[menu, ""], [pattern, ".pattern"], [escalations, ".max"]]) place(element, () => path() + end);
    const { on: chosen = [], pattern: text = "", max } = card.rule.escalate ?? {};
    for (const input of inputs) input.checked = chosen.includes(input.value);
    [pattern.value, escalations.value] = [text, max ?? ""];
    on("input", () => {
      const found = { on: inputs.filter((input) => input.checked).map((input) => input.value) };
      if (pattern.value) found.pattern = pattern.value;
      if (escalations.value) found.max = fields.read(escalations.value);
      if (found.on.length || found.pattern || found.max) card.rule.escalate = found;
      else delete card.rule.escalate;
      edited();
    }, menu);
    $("[data-do=close]", menu).act = () => fields.close(menu);
    return () => {
      const names = inputs.filter((input) => input.checked).map((input) => input.parentElement.textContent);
      menu.classList.toggle("is-on", names.length > 0);
      summary.textContent = names.length ? _("Next target if: %(checks)s", { checks: names.join(", ") }) : _("Answer check");
    };
  };

  const addCondition = (card, condition) => {
    card.conditions.push(condition);
    const chip = fields.conditionChip({
      condition,
      conditions: () => card.conditions,
      path: () => `rules[${indexOf(card.rule)}].when`,
      removed: () => {
        card.conditions.splice(card.conditions.indexOf(condition), 1);
        chip.remove();
        edited();
        card.adders.condition.focus();
      },
    });
    card.adders.condition.before(chip);
    return chip;
  };

  const addCard = (rule, before = null) => {
    const row = fields.copy("rule-template");
    const part = (selector) => $(selector, row);
    const adder = (name) => part(`[data-do=${name}]`);
    const card = { row, rule, conditions: [], targets: [], targetList: part("[data-targets]"), fallbackList: part("[data-fallbacks]") };
    card.adders = Object.fromEntries(["condition", "target", "fallback"].map((name) => [name, adder(name)]));
    if (before) cards.splice(cards.indexOf(before), 0, card);
    else cards.push(card);
    list.insertBefore(row, before?.row ?? null);
    const path = () => `rules[${indexOf(rule)}]`;
    const [name, strategy] = [part(".rule-name"), part("select")];
    for (const [element, end] of [[row, ""], [name, ".name"], [strategy, ".strategy"]]) place(element, () => path() + end);
    name.value = rule.name ?? "";
    on("input", () => { if (name.value) rule.name = name.value; else delete rule.name; edited(); }, name);
    strategy.value = rule.strategy ?? "weighted";
    on("change", () => { if (strategy.value === "weighted") delete rule.strategy; else rule.strategy = strategy.value; edited(); }, strategy);
    for (const condition of fields.conditionsOf(rule)) addCondition(card, condition);
    for (const target of rule.targets) card.targets.push(targetRow(card, target));
    card.describeChecks = answerChecks(card);
    card.adders.condition.act = () => {
      const used = card.conditions.map(({ field }) => field);
      const [field, { initial }] = Object.entries(fields.FIELDS).find(([key, { isRepeatable }]) => isRepeatable || !used.includes(key));
      const chip = addCondition(card, { field, value: initial() });
      edited();
      fields.open(chip);
    };
    card.adders.target.act = () => addTarget(card, {});
    card.adders.fallback.act = () => addTarget(card, { weight: 0 });
    for (const [direction, step] of [["up", -1], ["down", 1]]) {
      const button = part(`.rule-head [data-do=${direction}]`);
      button.act = () => {
        moveCard(card, cards.indexOf(card) + step);
        button.disabled ? name.focus() : button.focus();
      };
    }
    part(".rule-head [data-do=remove]").act = () => {
      const next = cards[cards.indexOf(card) + 1] ?? cards[cards.indexOf(card) - 1];
      cards.splice(cards.indexOf(card), 1);
      row.remove();
      edited();
      $(".rule-head [data-do=remove]", next.row).focus();
    };
    return card;
  };
  const moveCard = (card, index) => {
    if (index < 0 || index >= cards.length) return;
    cards.splice(cards.indexOf(card), 1);
    cards.splice(index, 0, card);
    list.insertBefore(card.row, cards[index + 1]?.row ?? null);
    edited();
  };
  document.getElementById("add-rule").act = () => {
    const last = cards.at(-1);
    const rule = { name: _("New rule"), when: { prompt_tokens: { at_most: 1000 } }, targets: structuredClone(last?.rule.targets ?? []) };
    const card = addCard(rule, last && !last.conditions.length ? last : null);
    edited();
    $(".rule-name", card.row).select();
    card.row.scrollIntoView({ block: "nearest" });
  };

  // The fields of the policy outside of its rules.
  const numbers = [...builder.querySelectorAll("[data-number]")];
  const conditions = [...builder.querySelectorAll("[data-fallback]")];
  const DEFAULT_FALLBACKS = ["error", "overload", "context"];
  const [overflow, similar, percent] = ["f-overflow", "f-similar", "f-shadow-percent"].map((id) => document.getElementById(id));
  for (const input of numbers) {
    const [name, part] = input.dataset.number.split(".");
    place(input, () => input.dataset.number);
    on("input", () => {
      const value = input.value.trim() ? fields.read(input.value) : undefined;
      if (part) policy[name] = { ...policy[name], [part]: value };
      else policy[name] = value;
      if (part && Object.values(policy[name]).every((each) => each === undefined)) delete policy[name];
      edited();
    }, input);
  }
  for (const input of conditions) on("change", () => { policy.fallback_on = conditions.filter((other) => other.checked).map((other) => other.dataset.fallback); edited(); }, input);
  const summarizer = fields.picker({ value: () => policy.summarizer, label: _("Model that summarizes"), path: () => "summarizer", choose: (name) => { policy.summarizer = name; } });
  $("#summarizer").append(summarizer);
  on("change", () => {
    delete policy.context_overflow;
    delete policy.summarizer;
    if (overflow.value !== "refuse") policy.context_overflow = overflow.value;
    if (overflow.value === "summarize") policy.summarizer = "";
    summarizer.describe();
    edited();
  }, overflow);
  on("change", () => { if (similar.checked) policy.semantic_cache = true; else delete policy.semantic_cache; edited(); }, similar);
  const shadow = fields.picker({ value: () => policy.shadow?.model, label: _("Shadow model"), path: () => "shadow.model", optional: _("None"), choose: (name) => {
    if (name) policy.shadow = { percent: 100, ...policy.shadow, model: name };
    else delete policy.shadow;
    percent.value = policy.shadow?.percent ?? "";
  } });
  $("#shadow").append(shadow);
  place(percent, () => "shadow.percent");
  on("input", () => { policy.shadow.percent = fields.read(percent.value); edited(); }, percent);
  const showPolicy = () => {
    for (const input of numbers) input.value = input.dataset.number.split(".").reduce((value, name) => value?.[name], policy) ?? "";
    const fallbacks = Array.isArray(policy.fallback_on) ? policy.fallback_on : DEFAULT_FALLBACKS;
    for (const input of conditions) input.checked = fallbacks.includes(input.dataset.fallback);
    overflow.value = policy.context_overflow ?? "refuse";
    similar.checked = Boolean(policy.semantic_cache);
    percent.value = policy.shadow?.percent ?? "";
    for (const menu of [summarizer, shadow]) menu.describe();
  };

  // Texts that depend on the whole policy, such as numbers of rules and shares of targets.
  const describe = () => {
    cards.forEach((card, index) => {
      const number = index + 1;
      const label = (text) => ({ "aria-label": text });
      const set = (selector, attributes) => Object.entries(attributes).forEach(([name, value]) => $(selector, card.row).setAttribute(name, value));
      set("[role=group]", label(_("Rule %(number)s", { number })));
      set(".rule-head [data-do=up]", label(_("Move rule %(number)s up", { number })));
      set(".rule-head [data-do=down]", label(_("Move rule %(number)s down", { number })));
      set(".rule-head [data-do=remove]", label(_("Remove rule %(number)s", { number })));
      $(".rule-head [data-do=up]", card.row).disabled = !index;
      $(".rule-head [data-do=down]", card.row).disabled = number === cards.length;
      $(".rule-head [data-do=remove]", card.row).disabled = cards.length === 1;
      $(".rule-number", card.row).textContent = number;
      $("[data-when]", card.row).textContent = card.conditions.length ? _("When") : index ? _("Every other request") : _("Every request");
      for (const target of card.targets) {
        target.describe();
        for (const [name, text] of [["up", _("Move %(model)s up", target.target)], ["remove", _("Remove %(model)s", target.target)]]) $(`[data-do=${name}]`, target.row).setAttribute("aria-label", text);
      }
      card.describeChecks();
    });
    $("#first-token").hidden = !(policy.fallback_on ?? []).includes("timeout") && policy.first_token_ms === undefined;
    $("#summarizer").hidden = policy.context_overflow !== "summarize";
    $("#shadow-share").hidden = !policy.shadow;
  };

  // The cards of the text, unless it is no policy.
  const parsed = () => {
    try {
      const found = JSON.parse(body.value);
      if (!fields.isObject(found)) return null;
      const rules = Array.isArray(found.models) && !found.rules ? [{ targets: found.models.map((model, index) => ({ model, ...(index ? { weight: 0 } : {}) })) }] : found.rules;
      const isShown = Array.isArray(rules) && rules.every(fields.canShow) && fields.isObject(found.shadow ?? {}) && fields.isObject(found.retries ?? {});
      return isShown ? [found, rules] : null;
    } catch {
      return null;
    }
  };
  const show = () => {
    const found = parsed();
    builder.hidden = !found;
    $("#builder-error").hidden = Boolean(found);
    if (!found) return;
    policy = found[0];
    cards = [];
    list.replaceChildren();
    for (const element of places.keys()) if (!element.isConnected) places.delete(element);
    for (const rule of found[1]) addCard(rule);
    showPolicy();
    describe();
  };
  on("input", () => { edits += 1; show(); }, body);

  // Marks of the newest check: errors at their fields, requests of each rule, and changes.
  // An error is below its field, and also below its rule if the menu of the field can be closed.
  const slotsOf = (element) => {
    const around = element.closest(".field, .rule-target");
    const card = element.closest(".rule-row");
    const own = around && ($(":scope > [data-slot]", around) ?? around.appendChild(Object.assign(document.createElement("p"), { className: "field-error" })));
    if (own) own.dataset.slot = "";
    const outer = !own || element.closest(".condition-fields") ? (card ? $("[data-error]", card) : $("#policy-error")) : null;
    return [own, outer].filter(Boolean);
  };
  let errorIds = 0;
  const marked = () => [...places.keys()].filter((element) => element.classList.contains("is-invalid"));
  const mark = (id) => {
    const { errors, requests, changes } = JSON.parse(document.getElementById(id).textContent);
    for (const element of marked()) {
      element.classList.remove("is-invalid");
      element.removeAttribute("aria-invalid");
      element.setAttribute("aria-describedby", element.dataset.hint ?? "");
    }
    for (const slot of document.querySelectorAll("[data-error], #policy-error")) { slot.hidden = true; slot.textContent = ""; }
    for (const slot of document.querySelectorAll("[data-slot]")) slot.remove();
    for (const { place: path, message } of errors) {
      const at = path.replace(/^models\[(\d+)\]$/, "rules[0].targets[$1].model");
      let [nearest, length] = [null, -1];
      for (const [element, pathOf] of places) {
        const own = element.isConnected && pathOf();
        if (own && own.length > length && (at === own || at.startsWith(`${own}.`) || at.startsWith(`${own}[`))) [nearest, length] = [element, own.length];
      }
      if (!nearest) continue;
      const slots = slotsOf(nearest);
      slots[0].id ||= `policy-error-${(errorIds += 1)}`;
      nearest.classList.add("is-invalid");
      if (nearest.matches("input, select")) nearest.setAttribute("aria-invalid", "true");
      nearest.dataset.hint ??= nearest.getAttribute("aria-describedby") ?? "";
      nearest.setAttribute("aria-describedby", `${nearest.dataset.hint} ${slots[0].id}`.trim());
      for (const slot of slots) { slot.hidden = false; slot.textContent = `${slot.textContent} ${message}`.trim(); }
    }
    cards.forEach(({ row }, index) => {
      const [change, count] = [$("[data-change]", row), $("[data-requests]", row)];
      change.hidden = !changes[index];
      change.textContent = changes[index] ?? "";
      count.hidden = requests[index] === undefined;
      count.textContent = count.hidden ? "" : _("%(requests)s requests", { requests: fields.formatValue(requests[index]) });
    });
  };
  place($("#id_name"), () => "name");
  const focusInvalid = () => {
    const [first] = marked().sort((one, other) => (one.compareDocumentPosition(other) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1));
    if (!first) return;
    for (let around = first.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
    (first.matches("input, select") ? first : $("input, select, summary", first))?.focus();
  };

  // The result of a check is shown if it is of the newest check, and nothing was edited since.
  const drawer = $("#drawer");
  let newest = null;
  let editsBefore = 0;
  let isSheet = false; // the drawer has the sheet of changes
  on("htmx:beforeRequest", ({ detail: { target, xhr } }) => { if (target.id === "checked") [newest, editsBefore] = [xhr, edits]; });
  on("htmx:beforeSwap", (event) => {
    const { target, xhr } = event.detail;
    if (target.id === "checked" && (xhr !== newest || edits !== editsBefore)) event.detail.shouldSwap = false;
  });
  on("htmx:afterSwap", ({ detail: { target } }) => {
    if (target.id === "checked") mark("check-marks");
    if (target !== drawer) return;
    isSheet = Boolean($("#sheet-marks"));
    if (isSheet) mark("sheet-marks");
  });

  // The sheet of changes. A conflict (409) is shown in it, too. After it is closed, the first refused field has focus.
  on("htmx:beforeSwap", ({ detail }) => {
    if (detail.target === drawer && detail.xhr.status === 409) [detail.shouldSwap, detail.isError] = [true, false];
  });
  on("close", () => { if (isSheet) focusInvalid(); isSheet = false; }, drawer);
  // The response to the chosen versions of rules is the merged policy, with which the user continues.
  on("htmx:beforeSwap", ({ detail }) => {
    if (detail.target !== drawer || !detail.xhr.getResponseHeader("Content-Type")?.startsWith("application/json")) return;
    detail.shouldSwap = false;
    const merged = JSON.parse(detail.xhr.responseText);
    body.value = merged.body;
    $("#id_base").value = merged.base;
    show();
    edits += 1;
    htmx.trigger(checkField, "edited");
    drawer.close();
    $(".rule-name", list)?.focus();
  });

  // Buttons of the builder, keys in its menus, and the order of rules by drag.
  on("click", ({ target }) => target.closest("button")?.act?.());
  on("keydown", (event) => {
    const menu = event.target.closest?.("#builder details.menu[open]");
    if (!menu || event.key !== "Enter" || !event.target.matches("input")) return;
    event.preventDefault();
    fields.close(menu);
  });
  builder.addEventListener("toggle", ({ target }) => { // it does not bubble
    if (!target.open || !target.matches(".chip-menu")) return;
    const content = target.lastElementChild;
    content.style.translate = "";
    const beyond = content.getBoundingClientRect().right + 12 - root.clientWidth;
    if (beyond > 0) content.style.translate = `${-beyond}px`;
  }, true);
  let dragged = null;
  const cardOf = (target) => cards.find(({ row }) => row === target.closest?.(".rule-row"));
  on("dragstart", (event) => {
    if (!event.target.closest?.(".rule-grip")) return;
    dragged = cardOf(event.target);
    event.dataTransfer.effectAllowed = "move";
    event.dataTransfer.setData("text/plain", String(cards.indexOf(dragged)));
    event.dataTransfer.setDragImage(dragged.row, 12, 12);
  });
  on("dragover", (event) => {
    const over = dragged && cardOf(event.target);
    if (!over) return;
    event.preventDefault();
    for (const card of cards) card.row.classList.toggle("is-drop-target", card === over && card !== dragged);
  });
  on("dragend", () => {
    dragged = null;
    for (const { row } of cards) row.classList.remove("is-drop-target");
  });
  on("drop", (event) => {
    const over = dragged && cardOf(event.target);
    if (!over) return;
    event.preventDefault();
    if (over !== dragged) moveCard(dragged, cards.indexOf(over));
  });

  show();
  mark("check-marks");

  // The browser asks before it leaves edits that were neither saved nor published.
  const written = () => `${$("#id_name").value}\n${body.value}`;
  const stored = written();
  let isSaved = false;
  on("htmx:beforeOnLoad", ({ detail: { xhr } }) => { isSaved ||= Boolean(xhr.getResponseHeader("HX-Redirect")); });
  on("beforeunload", (event) => { if (!isSaved && written() !== stored) event.preventDefault(); }, window);
})();
