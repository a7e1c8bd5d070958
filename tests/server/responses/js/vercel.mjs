// Vercel's AI SDK on the Responses API: questions on stdin, what the user gets on stdout.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const given = JSON.parse(readFileSync(0, "utf8"));
const ask = given.ask;
const openai = createOpenAI({ baseURL: given.url, apiKey: "alice" });
const client = new OpenAI({ baseURL: given.url, apiKey: "alice", maxRetries: 0 });
const city = z.object({ city: z.string(), country: z.string(), population: z.number().int() });
const tools = {
  get_weather: tool({
    description: "Get the current weather for a location",
    inputSchema: z.object({ city: z.string() }),
    execute: ({ city }) => given.weather[city],
  }),
};

const interpreter = { code_interpreter: openai.tools.codeInterpreter() };

const asked = (options = {}) => ({
  model: openai.responses(given.model),
  maxRetries: 0,
  // Without `forceReasoning` the SDK takes a model of another name for one that does not reason.
  providerOptions: { openai: { forceReasoning: true, reasoningSummary: "auto", ...options } },
});

// What a whole answer has, of a streamed one when it has ended.
async function told(fields, stream) {
  if (!stream) return generateText(fields);
  const result = streamText({ ...fields, onError: ({ error }) => { throw error; } });
  let said = "";
  for await (const delta of result.textStream) said += delta;
  const [text, steps, response, usage] = [await result.text, await result.steps, await result.response, await result.totalUsage];
  if (!said.endsWith(text)) throw new Error(`the deltas are not the answer: ${said}`);
  return { text, steps, response, totalUsage: usage };
}

const thoughts = (result) => result.steps.map((step) => step.reasoningText);
const metadata = (result) => result.steps.at(-1).providerMetadata.openai;

async function read() {
  const result = await told({ ...asked(), prompt: ask.read[0] }, true);
  const { inputTokens, outputTokens, outputTokenDetails } = result.totalUsage;
  const usage = [inputTokens, outputTokens, outputTokenDetails.reasoningTokens];
  return { id: metadata(result).responseId, texts: [result.text], thoughts: thoughts(result), usage };
}

function runs(result) {
  const parts = result.steps.flatMap((step) => step.content).filter((part) => part.toolName === "code_interpreter");
  const results = parts.filter((part) => part.type === "tool-result");
  return results.map((part) => [part.input.code, part.output.outputs.map((out) => out.logs).join("")]);
}

async function functions(question, stream, options, more) {
  const fields = { ...asked(options), prompt: question, tools: { ...tools, ...more }, stopWhen: stepCountIs(5) };
  const result = await told(fields, stream);
  const calls = result.steps
    .flatMap((step) => step.toolCalls.filter((call) => !call.providerExecuted))
    .map((call) => [call.toolName, call.input]);
  const parts = result.steps.flatMap((step) => step.content);
  const sealed = parts.filter((part) => part.type === "reasoning" && part.providerMetadata.openai.reasoningEncryptedContent);
  return { texts: [result.text], calls, thoughts: thoughts(result), sealed: sealed.length, runs: [runs(result)] };
}

async function shaped() {
  const { output } = await generateText({ ...asked(), prompt: ask.shaped[0], output: Output.object({ schema: city }) });
  return output;
}

// The second question comes after everything that the first turn showed.
async function python(stream, options) {
  const messages = [];
  const texts = [], ran = [];
  for (const question of ask.python) {
    messages.push({ role: "user", content: question });
    const fields = { ...asked(options), messages, tools: interpreter };
    const result = await told(fields, stream);
    messages.push(...result.response.messages);
    texts.push(result.text);
    ran.push(runs(result));
  }
  return { texts, runs: ran };
}

async function chained() {
  const first = await generateText({ ...asked(), prompt: ask.chained[0] });
  const second = await generateText({ ...asked({ previousResponseId: metadata(first).responseId }), prompt: ask.chained[1] });
  return { texts: [first.text, second.text], id: metadata(second).responseId };
}

async function conversation() {
  const made = await client.conversations.create();
  const texts = [];
  for (const prompt of ask.conversation) {
    texts.push((await generateText({ ...asked({ conversation: made.id }), prompt })).text);
  }
  const kept = [];
  for await (const item of client.conversations.items.list(made.id, { order: "asc" })) kept.push(item.type);
  return { texts, kept };
}

const scenes = {
  read: await read(),
  function: await functions(ask.function[0], false),
  function_streamed: await functions(ask.function_streamed[0], true),
  sealed: await functions(ask.sealed[0], false, { store: false }),
  mixed: await functions(ask.mixed[0], false, {}, interpreter), // without `store` the SDK leaves the python call out
  shaped: await shaped(),
  python: await python(false),
  python_streamed: await python(true),
  chained: await chained(),
  conversation: await conversation(),
};
console.log(JSON.stringify(scenes));
