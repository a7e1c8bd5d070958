// OpenAI's Agents SDK for JavaScript: questions on stdin, what the user gets on stdout.
import { readFileSync } from "node:fs";
import { Agent, codeInterpreterTool, OpenAIResponsesModel, Runner, setTracingDisabled, tool, user } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

const given = JSON.parse(readFileSync(0, "utf8"));
const ask = given.ask;
const client = new OpenAI({ baseURL: given.url, apiKey: "alice", maxRetries: 0 });
const runner = new Runner();
setTracingDisabled(true);
const city = z.object({ city: z.string(), country: z.string(), population: z.number().int() });
const getWeather = tool({
  name: "get_weather",
  description: "Get the current weather for a location",
  parameters: z.object({ city: z.string() }),
  execute: ({ city }) => given.weather[city],
});

function agent({ settings = {}, ...options } = {}) {
  const include = ["code_interpreter_call.outputs", ...(settings.include ?? [])];
  const modelSettings = { reasoning: { summary: "auto" }, ...settings, providerData: { include, ...settings.providerData } };
  return new Agent({ name: "a", model: new OpenAIResponsesModel(client, given.model), modelSettings, ...options });
}

async function told(asked, input, stream, options = {}) {
  if (!stream) return runner.run(asked, input, options);
  const result = await runner.run(asked, input, { stream: true, ...options });
  let said = "";
  for await (const delta of result.toTextStream()) said += delta;
  await result.completed;
  if (said !== result.finalOutput) throw new Error(`the deltas are not the answer: ${said}`);
  return result;
}

const raw = (result, kind) => result.newItems.map((item) => item.rawItem).filter((item) => item.type === kind);
const thought = (item) => item.content.map((part) => part.text).join("");
const thoughts = (result) => raw(result, "reasoning").map(thought);

async function read() {
  const result = await told(agent(), ask.read[0], true);
  const used = result.runContext.usage;
  const reasoning = used.outputTokensDetails[0].reasoning_tokens;
  const usage = [used.inputTokens, used.outputTokens, reasoning];
  return { id: result.lastResponseId, texts: [result.finalOutput], thoughts: thoughts(result), usage };
}

function runs(result) {
  const ran = raw(result, "hosted_tool_call").map((call) => call.providerData);
  return ran.map((call) => [call.code, call.outputs.map((out) => out.logs).join("")]);
}

async function functions(question, stream, settings, ...more) {
  const result = await told(agent({ tools: [getWeather, ...more], settings }), question, stream);
  const calls = raw(result, "function_call").map((call) => [call.name, JSON.parse(call.arguments)]);
  const sealed = raw(result, "reasoning").filter((item) => item.providerData?.encrypted_content).length;
  return { texts: [result.finalOutput], calls, thoughts: thoughts(result), sealed, runs: [runs(result)] };
}

async function shaped() {
  return (await runner.run(agent({ outputType: city }), ask.shaped[0])).finalOutput;
}

// The second question comes after everything that the first turn showed.
async function python(stream) {
  let history = [];
  const texts = [], ran = [];
  for (const question of ask.python) {
    const result = await told(agent({ tools: [codeInterpreterTool()] }), [...history, user(question)], stream);
    history = result.history;
    texts.push(result.finalOutput);
    ran.push(runs(result));
  }
  return { texts, runs: ran };
}

async function chained() {
  const first = await runner.run(agent(), ask.chained[0]);
  const second = await runner.run(agent(), ask.chained[1], { previousResponseId: first.lastResponseId });
  return { texts: [first.finalOutput, second.finalOutput], id: second.lastResponseId };
}

async function conversation() {
  const made = await client.conversations.create();
  const texts = [];
  for (const question of ask.conversation) {
    texts.push((await runner.run(agent(), question, { conversationId: made.id })).finalOutput);
  }
  const kept = [];
  for await (const item of client.conversations.items.list(made.id, { order: "asc" })) kept.push(item.type);
  return { texts, kept };
}

const stateless = { store: false, include: ["reasoning.encrypted_content"] };
const scenes = {
  read: await read(),
  function: await functions(ask.function[0], false),
  function_streamed: await functions(ask.function_streamed[0], true),
  sealed: await functions(ask.sealed[0], false, stateless),
  mixed: await functions(ask.mixed[0], false, stateless, codeInterpreterTool()),
  shaped: await shaped(),
  python: await python(false),
  python_streamed: await python(true),
  chained: await chained(),
  conversation: await conversation(),
};
console.log(JSON.stringify(scenes));
