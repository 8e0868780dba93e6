"use strict";
// The fields of a rule of a policy: conditions in chips, and models in pickers. Each change is written to the object of
// the policy. What is typed and is no number stays a text there, so that the server refuses it and nothing is lost.
const ruleFields = ({ data, edited, place }) => {
  const locale = document.documentElement.lang;
  const copy = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);
  const make = (name, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  };
  const read = (text) => (/^\d{1,15}$/.test(text.trim()) ? Number(text) : text.trim());
  const formatValue = (value) => (typeof value === "number" ? value.toLocaleString(locale) : String(value));
  const listed = (values) => values.map(String).join(", ");
  const split = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);
  const close = (menu) => { menu.open = false; $("summary", menu).focus(); };
  const open = (menu) => { menu.open = true; $("input:not([type=hidden]), select", menu)?.focus(); };

  // A labeled field, whose value is at a path of the policy.
  const labeled = (text, input, path) => {
    if (path) place(input, path);
    return make("div", { className: "field" }, make("label", {}, text, input));
  };
  const typed = (value, write, attributes = {}) => {
    const input = make("input", { autocomplete: "off", spellcheck: false, ...attributes, value });
    on("input", () => { write(input.value); edited(); }, input);
    return input;
  };
  const numeric = (value, write) => typed(value ?? "", (text) => write(read(text)), { inputMode: "numeric" });
  const boxes = (legend, choices, chosen, write) => {
    const inputs = choices.map(({ id }) => make("input", { type: "checkbox", checked: chosen.includes(id) }));
    const labels = choices.map(({ name }, index) => make("label", {}, inputs[index], name));
    const group = make("fieldset", { className: "field" }, make("legend", {}, legend), make("div", {}, ...labels));
    on("change", () => { write(choices.filter((_choice, index) => inputs[index].checked).map(({ id }) => id)); edited(); }, group);
    return group;
  };

  const AT_LEAST = "at_least";
  const AT_MOST = "at_most";
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  const range = (initial, unit = "") => ({
    fits: isObject,
    initial: () => ({ ...initial }),
    operators: [[AT_LEAST, _("at least")], [AT_MOST, _("at most")], ["between", _("between")]],
    operatorOf: (value) => (AT_MOST in value ? (AT_LEAST in value ? "between" : AT_MOST) : AT_LEAST),
    change: (value, operator) => {
      const first = value[AT_LEAST] ?? value[AT_MOST];
      if (operator === "between") return { [AT_LEAST]: first, [AT_MOST]: value[AT_MOST] ?? first };
      return { [operator]: value[operator] ?? first };
    },
    words: (value) => {
      const [least, most] = [value[AT_LEAST], value[AT_MOST]].map((end) => end !== undefined && formatValue(end) + unit);
      return least && most ? ["", `${least} – ${most}`] : most ? ["≤", most] : ["≥", least];
    },
    fields: ({ value, path }) => [AT_LEAST, AT_MOST].filter((end) => end in value).map((end) =>
      labeled(end === AT_LEAST ? _("Minimum") : _("Maximum"), numeric(value[end], (number) => { value[end] = number; }), () => `${path()}.${end}`)),
  });
  const flag = () => ({
    fits: (value) => typeof value === "boolean",
    initial: () => true,
    operators: [["true", _("present")], ["false", _("not present")]],
    operatorOf: String,
    change: (_value, operator) => operator === "true",
    words: (value) => ["", value ? _("present") : _("not present")],
    fields: () => [],
  });
  const oneOf = { fits: Array.isArray, operators: [["in", _("is one of")]], operatorOf: () => "in", change: (value) => value };
  const named = (rows) => ({
    ...oneOf,
    initial: () => [],
    words: (value) => [_("is"), value.map((id) => rows.find((row) => row.id === id)?.name ?? _("No. %(pk)s", { pk: id })).join(", ")],
    fields: ({ value, write, label, path }) => {
      const unknown = value.filter((id) => !rows.some((row) => row.id === id)).map((id) => ({ id, name: _("No. %(pk)s", { pk: id }) }));
      const group = boxes(label, [...rows, ...unknown], value, write);
      place(group, path);
      return [group];
    },
  });
  const DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"].map((id, index) =>
    ({ id, name: new Date(Date.UTC(2024, 0, 1 + index)).toLocaleDateString(locale, { weekday: "short", timeZone: "UTC" }) }));
  const FIELDS = {
    prompt_tokens: { label: _("prompt tokens"), ...range({ [AT_LEAST]: 1000 }) },
    tools: { label: _("tools"), ...flag() },
    schema: { label: _("structured output"), ...flag() },
    images: { label: _("images"), ...flag() },
    task: {
      label: _("task label"), ...oneOf, initial: () => [], words: (value) => [_("is"), listed(value)],
      fields: ({ value, write, path }) => [labeled(_("Labels, separated by commas"), typed(listed(value), (text) => write(split(text))), path)],
    },
    metadata: {
      label: _("metadata"), ...oneOf, isRepeatable: true,
      fits: (value) => isObject(value) && Object.values(value).every(Array.isArray),
      initial: () => ({ name: "", values: [] }),
      words: ({ name, values }) => [name, "=", listed(values)],
      fields: ({ value, path }) => [
        labeled(_("Name"), typed(value.name, (text) => { value.name = text.trim(); }), path),
        labeled(_("Values, separated by commas"), typed(listed(value.values), (text) => { value.values = split(text); }), () => `${path()}.${value.name}`),
      ],
    },
    keys: { label: _("API key"), ...named(data.keys) },
    projects: { label: _("project"), ...named(data.projects) },
    hours: {
      label: _("time of day"), operators: [["between", _("between")]], operatorOf: () => "between", change: (value) => value, fits: isObject,
      initial: () => ({ start: "08:00", end: "18:00", zone: data.zone }),
      words: ({ start, end, zone, days }) => ["", `${start} – ${end} ${zone ?? "UTC"}${days ? `, ${DAYS.filter(({ id }) => days.includes(id)).map(({ name }) => name).join(" ")}` : ""}`],
      fields: ({ value, path }) => [
        labeled(_("From (HH:MM)"), typed(value.start, (text) => { value.start = text; }, { maxLength: 5 }), () => `${path()}.start`),
        labeled(_("To (HH:MM)"), typed(value.end, (text) => { value.end = text; }, { maxLength: 5 }), () => `${path()}.end`),
        labeled(_("Time zone"), typed(value.zone ?? "UTC", (text) => { value.zone = text; }, { maxLength: 64 }), () => `${path()}.zone`),
        boxes(_("Days"), DAYS, value.days ?? DAYS.map(({ id }) => id), (days) => { if (days.length < DAYS.length) value.days = days; else delete value.days; }),
      ],
    },
    budget_left: { label: _("budget left"), ...range({ [AT_MOST]: 20 }, "%") },
    complexity: { label: _("complexity"), ...range({ [AT_LEAST]: 500 }) },
  };

  // The conditions of a rule as a list, in which each metadata field is one. They are written back as the object.
  const conditionsOf = (rule) => Object.entries(rule.when ?? {}).flatMap(([field, value]) =>
    (field === "metadata" ? Object.entries(value).map(([name, values]) => ({ field, value: { name, values } })) : [{ field, value }]));
  const writeConditions = (rule, conditions) => {
    const when = {};
    for (const { field, value } of conditions) {
      if (field !== "metadata") { when[field] = value; continue; }
      when.metadata ??= {};
      when.metadata[value.name] = [...(when.metadata[value.name] ?? []), ...value.values];
    }
    if (conditions.length) rule.when = when;
    else delete rule.when;
  };

  // The chip of a condition: its text, and the fields that its menu has.
  const conditionChip = ({ condition, conditions, path, removed }) => {
    const chip = copy("condition-template");
    const [summary, fields, field, operator] = ["summary", ".condition-value", "[data-field]", "[data-operator]"].map((part) => $(part, chip));
    const pathOf = () => (condition.field === "metadata" ? `${path()}.metadata` : `${path()}.${condition.field}`);
    place(chip, pathOf);
    const describe = () => {
      const { label, words } = FIELDS[condition.field];
      const parts = words(condition.value);
      const sign = parts.slice(0, -1).filter(Boolean).join(" ");
      summary.replaceChildren(make("span", {}, label), ...(sign ? [make("span", { className: "text-muted" }, sign)] : []), make("b", {}, parts.at(-1) || "…"));
    };
    const write = (value) => { condition.value = value; };
    const fill = () => {
      const { label, operators, operatorOf, fields: build } = FIELDS[condition.field];
      operator.replaceChildren(...operators.map(([value, text]) => new Option(text, value)));
      operator.value = operatorOf(condition.value);
      fields.replaceChildren(...build({ value: condition.value, write, label, path: pathOf }));
      describe();
    };
    const offer = () => {
      const used = new Set(conditions().filter((other) => other !== condition && !FIELDS[other.field].isRepeatable).map((other) => other.field));
      field.replaceChildren(...Object.entries(FIELDS).map(([value, { label }]) => {
        const option = new Option(label, value);
        option.disabled = used.has(value);
        return option;
      }));
      field.value = condition.field;
    };
    on("change", () => { Object.assign(condition, { field: field.value, value: FIELDS[field.value].initial() }); fill(); edited(); }, field);
    on("change", () => { condition.value = FIELDS[condition.field].change(condition.value, operator.value); fill(); edited(); }, operator);
    on("input", describe, chip);
    on("change", describe, chip);
    on("toggle", () => chip.open && offer(), chip);
    $("[data-do=remove]", chip).act = () => removed(chip);
    $("[data-do=close]", chip).act = () => close(chip);
    offer();
    fill();
    return chip;
  };

  // The picker of a model, with its price and state. The models of `taken` cannot be chosen.
  let pickers = 0;
  const modelOf = (name) => data.models.find((model) => model.name === name) ?? { name, price: "", ...data.unknown };
  const badge = ({ state, color }) => make("span", { className: `badge ${color}` }, state);
  const picker = ({ value, label, path, taken = () => [], choose, optional = "" }) => {
    const menu = copy("picker-template");
    const [summary, search, choices] = ["summary", "input", ".model-choices > div"].map((part) => $(part, menu));
    const group = `model-${(pickers += 1)}`;
    place(menu, path);
    const describe = () => {
      const name = value();
      const heading = make("span", { className: "visually-hidden" }, label);
      if (!name) return summary.replaceChildren(heading, make("span", { className: "text-muted" }, optional || _("Choose a model")));
      const model = modelOf(name);
      summary.replaceChildren(heading, make("span", { className: "mono text-wrap" }, name), make("span", { className: "text-muted tabular" }, model.price), badge(model));
    };
    const fill = () => {
      const [others, current] = [taken(), value()];
      const rows = current && !data.models.some(({ name }) => name === current) ? [...data.models, modelOf(current)] : data.models;
      const empty = optional ? [make("label", {}, make("input", { type: "radio", name: group, value: "", checked: !current }), optional)] : [];
      choices.replaceChildren(...empty, ...rows.map((model) => {
        const input = make("input", { type: "radio", name: group, value: model.name, checked: model.name === current, disabled: others.includes(model.name) });
        const text = make("span", {}, make("span", { className: "mono text-wrap" }, model.name), make("span", { className: "text-muted tabular" }, model.price));
        return make("label", {}, input, text, badge(model));
      }));
    };
    on("toggle", () => { if (menu.open) { search.value = ""; fill(); } }, menu);
    on("input", () => {
      for (const row of choices.children) row.hidden = !$("input", row).value.toLowerCase().includes(search.value.trim().toLowerCase());
    }, search);
    on("change", ({ target }) => { choose(target.value); describe(); edited(); }, choices);
    on("click", (event) => { if (event.detail && event.target.closest("label")) setTimeout(() => close(menu)); }, choices);
    menu.describe = describe;
    describe();
    return menu;
  };

  const canShow = (rule) => isObject(rule) && Array.isArray(rule.targets) && rule.targets.every(isObject) && isObject(rule.when ?? {})
    && Object.entries(rule.when ?? {}).every(([field, value]) => FIELDS[field]?.fits(value)) && isObject(rule.escalate ?? {}) && Array.isArray(rule.escalate?.on ?? []);
  return { FIELDS, canShow, isObject, conditionsOf, writeConditions, conditionChip, picker, read, copy, close, open, formatValue };
};
