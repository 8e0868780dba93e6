// The openai SDK with responses.

import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import * as m from "./features.mjs";

const City = z.object({ name: z.string(), population: z.number().int() });
const TOOL = { type: "function", name: "get_weather", parameters: m.PARAMETERS, strict: true };
const make = (apiKey) => new OpenAI({ baseURL: m.OPENAI_URL, apiKey, maxRetries: 0 });
const client = make(m.KEY);
const callsOf = (response) =>
  response.output.filter((item) => item.type === "function_call").map((call) => [call.name, JSON.parse(call.arguments).city]);

async function plain() {
  const answer = await client.responses.create({ model: m.MODEL, input: m.HELLO, max_output_tokens: 16 });
  m.check(answer.output_text, "no text");
  m.check(answer.usage.output_tokens > 1, "no usage");
}

async function stream() {
  const events = client.responses.stream({ model: m.SCRIPTED, input: m.script("plain") });
  let text = "";
  events.on("response.output_text.delta", (event) => (text += event.delta));
  const final = await events.finalResponse();
  m.equal(final.output_text, text);
  m.check(final.usage.output_tokens > 1, "no usage");
}

async function reasoning() {
  const final = await client.responses.stream({ model: m.SCRIPTED, input: m.script("reasoning") }).finalResponse();
  m.equal([final.output[0].content[0].text, final.output_text], m.REASONING);
}

async function tools() {
  const input = m.user(m.script("weather"));
  const final = await client.responses.stream({ model: m.SCRIPTED, input, tools: [TOOL] }).finalResponse();
  m.equal(callsOf(final), [["get_weather", "Paris"]]);
  const call = final.output[0];
  input.push(...final.output, { type: "function_call_output", call_id: call.call_id, output: "sunny" });
  const answer = await client.responses.create({ model: m.SCRIPTED, input, tools: [TOOL] });
  m.equal(answer.output_text, "It is sunny in Paris.");
}

async function parallel() {
  const options = { model: m.SCRIPTED, input: m.script("parallel"), tools: [TOOL] };
  const streamed = await client.responses.stream(options).finalResponse();
  for (const response of [streamed, await client.responses.create(options)]) {
    m.equal(callsOf(response), [["get_weather", "Paris"], ["get_weather", "Rome"]]);
    m.equal(response.output_text, "Two calls.");
  }
}

async function structured() {
  const answer = await client.responses.parse({
    model: m.SCRIPTED, input: m.script("city"), text: { format: zodTextFormat(City, "city") },
  });
  m.equal(answer.output_parsed, m.CITY);
}

async function abort() {
  const events = await client.responses.create({ model: m.SCRIPTED, input: m.script("long"), stream: true });
  let count = 0;
  for await (const _ of events) if (++count === 10) break;
}

const call = ({ key, model, prompt, maxTokens }) =>
  make(key).responses.create({ model, input: prompt, max_output_tokens: maxTokens });

await m.run({
  plain, stream, tools, "parallel tools": parallel, "structured output": structured, reasoning, ...m.errors(call), abort,
});
