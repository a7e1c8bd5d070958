// The operator's page: the server's parts, and live values from /metrics.

import { getJson, key } from "./api.js";
import { byId, el, visible } from "./dom.js";
import { sums } from "./metrics.js";

const EVERY = 2000; // ms
/** @type {Map<string, number> | null} */
let before = null;
let at = 0;

/**
 * @param {string} id
 * @param {[string, string][]} rows
 */
function table(id, rows) {
  byId(id).replaceChildren(
    ...rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, visible(name)), el("td", {}, visible(value)))),
  );
}

async function facts() {
  const server = await getJson("ui/server");
  /** @type {[string, string][]} */
  const rows = [
    ["Model", server.model],
    ["vllm-gptoss", server.version],
    ["vLLM", server.vllm],
    ["Store", server.store],
  ];
  for (const [part, why] of Object.entries(server.off)) rows.push([`${part}: off`, String(why)]);
  for (const tool of server.tools) {
    const names = tool.namespaces.map((/** @type {any} */ space) => space.name).join(", ");
    rows.push([`Tool ${tool.name}`, tool.unavailable ? `off: ${tool.unavailable}` : `on (${names})`]);
  }
  table("facts", rows);
}

async function live() {
  const answer = await fetch(new URL("../metrics", document.baseURI), { credentials: "omit" });
  if (!answer.ok) throw new Error(`/metrics: HTTP ${answer.status}`);
  const now = sums(await answer.text());
  const seconds = (performance.now() - at) / 1000;
  const value = (/** @type {string} */ name) => now.get(name) ?? 0;
  const rate = (/** @type {string} */ name) =>
    before ? ((value(name) - (before.get(name) ?? 0)) / seconds).toFixed(1) : "…";
  table("live", [
    ["Requests running", String(value("vllm:num_requests_running"))],
    ["Requests waiting", String(value("vllm:num_requests_waiting"))],
    ["Prompt tokens per second", rate("vllm:prompt_tokens_total")],
    ["Generated tokens per second", rate("vllm:generation_tokens_total")],
    ["KV cache in use", `${(100 * value("vllm:kv_cache_usage_perc")).toFixed(1)} %`],
    ["Requests finished", String(value("vllm:request_success_total"))],
    ["Preemptions", String(value("vllm:num_preemptions_total"))],
    ["Tool calls running", String(value("gptoss_tool_calls_running"))],
    ["Tool calls waiting", String(value("gptoss_tool_calls_waiting"))],
    ["Tool calls finished", String(value("gptoss_tool_call_seconds_count"))],
  ]);
  before = now;
  at = performance.now();
}

/** @param {() => Promise<void>} work */
async function attempt(work) {
  try {
    await work();
    byId("error").textContent = "";
  } catch (error) {
    byId("error").textContent = visible(error instanceof Error ? error.message : String(error));
  }
}

byId("key").value = key.get();
byId("key").addEventListener("change", () => {
  key.set(byId("key").value.trim());
  attempt(facts);
});
attempt(facts).then(() => attempt(live));
setInterval(() => document.hidden || attempt(live), EVERY);
