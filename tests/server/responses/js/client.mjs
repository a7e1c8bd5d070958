// Plays requests through openai-node: `node client.mjs <base url> <requests.json>` prints what the client saw, as JSON.
import { readFile } from "node:fs/promises";
import OpenAI from "openai";

const [baseURL, file] = process.argv.slice(2);
const requests = JSON.parse(await readFile(file, "utf8"));
const client = new OpenAI({ baseURL, apiKey: "alice", maxRetries: 0 });
const seen = {};

for (const [name, body] of Object.entries(requests)) {
  const events = [];
  for await (const event of await client.responses.create({ ...body, stream: true })) events.push(event);
  const helper = client.responses.stream(body);
  const heard = [];
  helper.on("event", (event) => heard.push(event.type));
  const final = await helper.finalResponse();
  const stored = await client.responses.retrieve(final.id);
  seen[name] = { events, heard, final, stored };
}
console.log(JSON.stringify(seen));
