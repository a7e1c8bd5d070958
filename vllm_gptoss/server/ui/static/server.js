// The operator's page: the server's parts, and live values from /metrics.

import { getJson, key } from "./api.js";
import { t } from "./appearance.js";
import { byId, el, visible } from "./dom.js";
import { by, samples, sum } from "./metrics.js";

const EVERY = 2000; // ms
const LONG_PAUSE = 'le="0.1"'; // seconds, a bucket of gptoss_event_loop_pause_seconds
/** @type {import("./metrics.js").Sample[] | null} */
let before = null;
let at = 0;

/**
 * @param {string} id
 * @param {[string, string][]} rows
 */
function table(id, rows) {
  const cells = rows.map(([name, value]) => [el("th", { scope: "row" }, visible(name)), el("td", {}, visible(value))]);
  byId(id).replaceChildren(...cells.map((row) => el("tr", {}, ...row)));
}

async function facts() {
  const server = await getJson("ui/server");
  /** @type {[string, string][]} */
  const rows = [
    [t("Model"), server.model],
    ["vllm-gptoss", server.version],
    ["vLLM", server.vllm],
    [t("Store"), server.store],
  ];
  for (const [part, why] of Object.entries(server.off)) rows.push([t("{}: off", part), String(why)]);
  for (const tool of server.tools) {
    const names = tool.namespaces.map((/** @type {any} */ space) => space.name).join(", ");
    rows.push([t("Tool {}", tool.name), tool.unavailable ? `${t("off")}: ${tool.unavailable}` : `${t("on")} (${names})`]);
  }
  table("facts", rows);
}

/**
 * @param {import("./metrics.js").Sample[]} now
 * @param {number} seconds since `before`
 * @returns {[string, string][]}
 */
function rowsOf(now, seconds) {
  const value = (/** @type {string} */ name) => String(sum(now, name));
  const rate = (/** @type {string} */ name) =>
    before ? ((sum(now, name) - sum(before, name)) / seconds).toFixed(1) : "…";
  const each = (/** @type {string} */ name, /** @type {string} */ label) =>
    by(now, name, label).map(([key, number]) => `${key}: ${number}`).join(", ") || "0";
  const pauses = "gptoss_event_loop_pause_seconds";
  const mean = sum(now, "gptoss_store_seconds_sum") / sum(now, "gptoss_store_seconds_count");
  return [
    [t("Requests running"), value("vllm:num_requests_running")],
    [t("Requests waiting"), value("vllm:num_requests_waiting")],
    [t("Prompt tokens per second"), rate("vllm:prompt_tokens_total")],
    [t("Generated tokens per second"), rate("vllm:generation_tokens_total")],
    [t("KV cache in use"), `${(100 * sum(now, "vllm:kv_cache_usage_perc")).toFixed(1)} %`],
    [t("Steps by tokens"), bands(now)],
    [t("Preemptions"), value("vllm:num_preemptions_total")],
    [t("Responses"), each("gptoss_responses_total", "status")],
    [t("Background responses"), each("gptoss_background_responses", "state")],
    [t("Tool calls running"), value("gptoss_tool_calls_running")],
    [t("Tool calls waiting"), value("gptoss_tool_calls_waiting")],
    [t("Tool calls finished"), each("gptoss_tool_calls_total", "tool")],
    [t("Tool errors"), each("gptoss_tool_errors_total", "type")],
    [t("Harmony repairs"), each("gptoss_harmony_repairs_total", "kind")],
    [t("Store transactions"), `${value("gptoss_store_seconds_count")} (${(1000 * (mean || 0)).toFixed(1)} ms)`],
    [t("Store errors"), value("gptoss_store_errors_total")],
    [t("Event-loop pauses over 0.1 s"), String(sum(now, `${pauses}_count`) - sum(now, `${pauses}_bucket`, LONG_PAUSE))],
  ];
}

/**
 * How many steps had up to 8, 16, … tokens, from a histogram's buckets, which count all steps up to their bound.
 * @param {import("./metrics.js").Sample[]} now
 */
function bands(now) {
  const bound = (/** @type {[string, number]} */ [le]) => (le === "+Inf" ? Infinity : Number(le));
  const buckets = by(now, "vllm:iteration_tokens_total_bucket", "le").sort((a, b) => bound(a) - bound(b));
  const shown = [];
  let below = 0;
  for (const bucket of buckets) {
    if (bucket[1] > below) shown.push(`≤ ${bound(bucket)}: ${bucket[1] - below}`);
    below = bucket[1];
  }
  return shown.join(", ") || "0";
}

async function live() {
  const answer = await fetch(new URL("../metrics", document.baseURI), { credentials: "omit" });
  if (!answer.ok) throw new Error(`/metrics: HTTP ${answer.status}`);
  const now = samples(await answer.text());
  table("live", rowsOf(now, (performance.now() - at) / 1000));
  before = now;
  at = performance.now();
}

async function refresh() {
  try {
    if (!byId("facts").children.length) await facts(); // first: it needs the API key
    await live();
    byId("error").textContent = "";
  } catch (error) {
    byId("error").textContent = visible(error instanceof Error ? error.message : String(error));
  }
}

byId("key").value = key.get();
byId("key").addEventListener("change", () => {
  key.set(byId("key").value.trim());
  refresh();
});
refresh();
setInterval(() => document.hidden || !before || refresh(), EVERY);
