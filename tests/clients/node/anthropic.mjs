// The Anthropic SDK.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

import * as m from "./features.mjs";

const City = z.object({ name: z.string(), population: z.number().int() });
const TOOL = { name: "get_weather", input_schema: m.PARAMETERS };
const make = (apiKey) => new Anthropic({ baseURL: m.URL, apiKey, maxRetries: 0, timeout: 50_000 });
const client = make(m.KEY);
const callsOf = (message) =>
  message.content.filter((block) => block.type === "tool_use").map((block) => [block.name, block.input.city]);

async function plain() {
  const message = await client.messages.create({ model: m.MODEL, messages: m.user(m.HELLO), max_tokens: 8 });
  m.check(message.content[0].text, "no text");
  m.equal(message.usage.output_tokens, 8);
}

async function stream() {
  const events = client.messages.stream({ model: m.MODEL, messages: m.user(m.HELLO), max_tokens: 8 });
  let text = "";
  events.on("text", (delta) => (text += delta));
  const message = await events.finalMessage();
  m.equal(message.content[0].text, text);
  m.equal([message.usage.output_tokens, message.stop_reason], [8, "max_tokens"]);
}

async function reasoning() {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const options = { model: m.SCRIPTED, messages: m.user(m.script("reasoning")), max_tokens: 2000, thinking };
  const { content } = await client.messages.stream(options).finalMessage();
  m.equal([content[0].thinking, content[1].text], m.REASONING);
}

async function tools() {
  const messages = m.user(m.script("weather"));
  const options = { model: m.SCRIPTED, messages, tools: [TOOL], max_tokens: 100 };
  const message = await client.messages.stream(options).finalMessage();
  m.equal(callsOf(message), [["get_weather", "Paris"]]);
  const result = { type: "tool_result", tool_use_id: message.content[0].id, content: "sunny" };
  messages.push({ role: "assistant", content: message.content }, { role: "user", content: [result] });
  m.equal((await client.messages.create(options)).content[0].text, "It is sunny in Paris.");
  const run = async ({ city }) => `sunny in ${city}`;
  const tool = betaZodTool({ name: "get_weather", description: "-", inputSchema: z.object({ city: z.string() }), run });
  const final = await client.beta.messages.toolRunner({
    model: m.SCRIPTED, messages: m.user(m.script("weather")), tools: [tool], max_tokens: 100,
  });
  m.equal(final.content[0].text, "It is sunny in Paris.");
}

async function parallel() {
  const options = { model: m.SCRIPTED, messages: m.user(m.script("parallel")), tools: [TOOL], max_tokens: 200 };
  const streamed = await client.messages.stream(options).finalMessage();
  for (const message of [streamed, await client.messages.create(options)]) {
    m.equal(callsOf(message), [["get_weather", "Paris"], ["get_weather", "Rome"]]);
    m.equal(message.content[0].text, "Two calls.");
  }
}

async function structured() {
  const message = await client.messages.parse({
    model: m.SCRIPTED, messages: m.user(m.script("city")), max_tokens: 100, output_config: { format: zodOutputFormat(City) },
  });
  m.equal(message.parsed_output, m.CITY);
}

async function abort() {
  const events = client.messages.stream({ model: m.SCRIPTED, messages: m.user(m.script("long")), max_tokens: 4000 });
  let count = 0;
  for await (const _ of events) if (++count === 5) break;
}

const call = ({ key, model, prompt, maxTokens }) =>
  make(key).messages.create({ model, messages: m.user(prompt), max_tokens: maxTokens });

await m.run({
  plain, stream, tools, "parallel tools": parallel, "structured output": structured, reasoning, ...m.errors(call), abort,
});
