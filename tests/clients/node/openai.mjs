// The openai SDK with chat completions.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import * as m from "./features.mjs";

const City = z.object({ name: z.string(), population: z.number().int() });
const TOOL = { type: "function", function: { name: "get_weather", parameters: m.PARAMETERS, strict: true } };
const make = (apiKey) => new OpenAI({ baseURL: m.OPENAI_URL, apiKey, maxRetries: 0 });
const client = make(m.KEY);
const callsOf = (message) => message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments).city]);

async function plain() {
  const answer = await client.chat.completions.create({
    model: m.MODEL, messages: m.user(m.HELLO), max_completion_tokens: 8,
  });
  m.check(answer.choices[0].message.content, "no text");
  m.equal(answer.usage.completion_tokens, 8);
}

async function stream() {
  const events = client.chat.completions.stream({
    model: m.MODEL, messages: m.user(m.HELLO), max_completion_tokens: 8, stream_options: { include_usage: true },
  });
  let text = "";
  events.on("content", (delta) => (text += delta));
  const completion = await events.finalChatCompletion().catch((error) => {
    if (error.name !== "LengthFinishReasonError" && !/length limit/.test(error.message)) throw error;
  });
  const usage = await events.totalUsage();
  m.check(text, "no text");
  m.equal(usage.completion_tokens, 8);
  if (completion) m.equal(completion.choices[0].message.content, text);
}

async function reasoning() {
  const options = { model: m.SCRIPTED, messages: m.user(m.script("reasoning")) };
  const { message } = (await client.chat.completions.create(options)).choices[0];
  m.equal([message.reasoning_content, message.content], m.REASONING);
}

async function tools() {
  const messages = m.user(m.script("weather"));
  const events = client.chat.completions.stream({ model: m.SCRIPTED, messages, tools: [TOOL] });
  const { message } = (await events.finalChatCompletion()).choices[0];
  m.equal(callsOf(message), [["get_weather", "Paris"]]);
  messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" });
  const answer = await client.chat.completions.create({ model: m.SCRIPTED, messages, tools: [TOOL] });
  m.equal(answer.choices[0].message.content, "It is sunny in Paris.");
  const runner = client.chat.completions.runTools({
    model: m.SCRIPTED,
    messages: m.user(m.script("weather")),
    tools: [{ type: "function", function: { ...TOOL.function, parse: JSON.parse, function: () => "sunny" } }],
  });
  m.equal(await runner.finalContent(), "It is sunny in Paris.");
}

async function parallel() {
  const options = { model: m.SCRIPTED, messages: m.user(m.script("parallel")), tools: [TOOL] };
  const streamed = (await client.chat.completions.stream(options).finalChatCompletion()).choices[0].message;
  const whole = (await client.chat.completions.create(options)).choices[0].message;
  for (const message of [streamed, whole]) {
    m.equal(callsOf(message), [["get_weather", "Paris"], ["get_weather", "Rome"]]);
    m.equal(message.content, "Two calls.");
  }
}

async function structured() {
  const answer = await client.chat.completions.parse({
    model: m.SCRIPTED, messages: m.user(m.script("city")), response_format: zodResponseFormat(City, "city"),
  });
  m.equal(answer.choices[0].message.parsed, m.CITY);
}

async function embeddings() {
  const answer = await client.embeddings.create({ model: m.EMBEDDING_MODEL, input: ["one", "two"] });
  m.equal(answer.data.map((each) => each.embedding.length), [384, 384]);
}

async function abort() {
  const chunks = await client.chat.completions.create({
    model: m.SCRIPTED, messages: m.user(m.script("long")), stream: true,
  });
  let count = 0;
  for await (const _ of chunks) if (++count === 5) break;
}

const call = ({ key, model, prompt, maxTokens }) =>
  make(key).chat.completions.create({ model, messages: m.user(prompt), max_tokens: maxTokens });

await m.run({
  plain, stream, tools, "parallel tools": parallel, "structured output": structured, reasoning, embeddings,
  ...m.errors(call), abort,
});
