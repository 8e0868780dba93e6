// The AI SDK's features with any of its providers.

import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import * as m from "./features.mjs";

const City = z.object({ name: z.string(), population: z.number().int() });
const weather = tool({
  description: "Return the weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});

// `make` takes a key and returns the provider's function from a model's name to a model.
// `city` is the script for structured output.
export function chatFeatures(make, { city = "city", ...options } = {}) {
  const model = make(m.KEY);
  const usual = { maxRetries: 0, ...options };

  async function plain() {
    const answer = await generateText({ ...usual, model: model(m.MODEL), prompt: m.HELLO, maxOutputTokens: 16 });
    m.check(answer.text, "no text");
    m.check(answer.usage.outputTokens > 1, "no usage");
  }

  async function stream() {
    const answer = streamText({ ...usual, model: model(m.MODEL), prompt: m.HELLO, maxOutputTokens: 16 });
    let text = "";
    for await (const delta of answer.textStream) text += delta;
    m.check(text, "no text");
    m.check((await answer.usage).outputTokens > 1, "no usage");
  }

  async function play(name) {
    const options = { ...usual, model: model(m.SCRIPTED), prompt: m.script(name), tools: { get_weather: weather } };
    const answer = streamText({ ...options, stopWhen: stepCountIs(3) });
    await answer.consumeStream();
    return answer;
  }

  async function tools() {
    m.equal(await (await play("weather")).text, "It is sunny in Paris.");
  }

  async function parallel() {
    const answer = await play("parallel");
    const calls = (await answer.steps)[0].toolCalls.map((call) => [call.toolName, call.input.city]);
    m.equal(calls, [["get_weather", "Paris"], ["get_weather", "Rome"]]);
    m.equal(await answer.text, "It is sunny in Paris and in Rome.");
  }

  async function reasoning() {
    const answer = streamText({ ...usual, model: model(m.SCRIPTED), prompt: m.script("reasoning") });
    m.equal([await answer.reasoningText, await answer.text], m.REASONING);
  }

  async function structured() {
    const output = Output.object({ schema: City });
    const answer = await generateText({ ...usual, model: model(m.SCRIPTED), prompt: m.script(city), output });
    m.equal(answer.output, m.CITY);
  }

  async function abort() {
    const controller = new AbortController();
    const answer = streamText({
      ...usual, model: model(m.SCRIPTED), prompt: m.script("long"), maxOutputTokens: 4000, abortSignal: controller.signal,
    });
    let count = 0;
    for await (const _ of answer.textStream) if (++count === 5) controller.abort();
  }

  const call = ({ key, model: name, prompt, maxTokens }) =>
    generateText({ ...usual, model: make(key)(name), prompt, maxOutputTokens: maxTokens });

  return {
    plain, stream, tools, "parallel tools": parallel, "structured output": structured, reasoning, ...m.errors(call), abort,
  };
}

export async function checkEmbeddings(model) {
  const answer = await embedMany({ model, values: ["one", "two"], maxRetries: 0 });
  m.equal(answer.embeddings.map((vector) => vector.length), [384, 384]);
}
