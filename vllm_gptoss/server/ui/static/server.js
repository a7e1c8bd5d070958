// The operator's page: the server's parts, doctor's findings, the last tool errors, and live values from /metrics.

import { getJson, key } from "./api.js";
import { t } from "./appearance.js";
import { byId, el, visible } from "./dom.js";
import { by, samples, sum } from "./metrics.js";

const EVERY = 2000; // ms
const FACTS_EVERY = 5; // refreshes
const STATUSES = ["problem", "warning", "info", "ok"]; // of doctor's findings
const LONG_PAUSE = 'le="0.1"'; // seconds, a bucket of gptoss_event_loop_pause_seconds
/** @type {import("./metrics.js").Sample[] | null} */
let before = null;
let at = 0;
let refreshes = 0;
/** @type {Record<string, string>} */
const shown = {};

/**
 * Shows rows, unless they are shown already: new nodes would end the reader's selection.
 * @param {string} id
 * @param {[string, string][]} rows
 */
function table(id, rows) {
  const state = JSON.stringify(rows);
  if (shown[id] === state) return;
  shown[id] = state;
  const cells = rows.map(([name, value]) => [el("th", { scope: "row" }, visible(name)), el("td", {}, visible(value))]);
  byId(id).replaceChildren(...cells.map((row) => el("tr", {}, ...row)));
}

async function facts() {
  const server = await getJson("ui/server?doctor");
  /** @type {[string, string][]} */
  const rows = [
    [t("Model"), server.model],
    ["vllm-gptoss", server.version],
    ["vLLM", server.vllm],
    [t("Store"), server.store],
  ];
  for (const [part, choice] of Object.entries(server.choices ?? {})) rows.push([t("Chosen: {}", part), String(choice)]);
  for (const [part, why] of Object.entries(server.off)) rows.push([t("{}: off", part), String(why)]);
  for (const tool of server.tools) {
    const names = tool.namespaces.map((/** @type {any} */ space) => space.name).join(", ");
    const limit = tool.at_once ? t("at most {} calls at once", tool.at_once) : "";
    const details = [`${t("on")} (${names})`, tool.isolation, limit, tool.note].filter(Boolean).join("; ");
    rows.push([t("Tool {}", tool.name), tool.unavailable ? `${t("off")}: ${tool.unavailable}` : details]);
  }
  table("facts", rows);
  table("errors", errorsOf(server.tool_errors));
  table("doctor", server.doctor ? findingsOf(server.doctor, server.choices) : [["Doctor", t("It runs…")]]);
}

/**
 * @param {any[]} errors oldest first
 * @returns {[string, string][]}
 */
function errorsOf(errors) {
  if (!errors.length) return [[t("Tool errors"), t("none")]];
  const time = (/** @type {any} */ error) => new Date(error.created_at * 1000).toLocaleTimeString();
  return errors.reverse().map((error) => [`${time(error)} ${error.tool}`, `${error.type}: ${error.message}`]);
}

/**
 * Doctor's findings, the worst first. Those that the engine's own choices replace are left out: doctor assumes defaults.
 * @param {any[]} findings
 * @param {Record<string, string>} choices
 * @returns {[string, string][]}
 */
function findingsOf(findings, choices) {
  const own = findings.filter((finding) => !(finding.check in choices));
  own.sort((a, b) => STATUSES.indexOf(a.status) - STATUSES.indexOf(b.status));
  return own.map(({ status, check, detail, fix }) => [`${status}: ${check}`, fix ? `${detail} → ${fix}` : detail]);
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
  const mean = (/** @type {string} */ name) =>
    `${(1000 * (sum(now, `${name}_sum`) / sum(now, `${name}_count`) || 0)).toFixed(1)} ms`;
  return [
    [t("Requests running"), value("vllm:num_requests_running")],
    [t("Requests waiting"), value("vllm:num_requests_waiting")],
    [t("Time in the queue, mean"), mean("vllm:request_queue_time_seconds")],
    [t("Time to first token, mean"), mean("vllm:time_to_first_token_seconds")],
    [t("Prompt tokens per second"), rate("vllm:prompt_tokens_total")],
    [t("Generated tokens per second"), rate("vllm:generation_tokens_total")],
    [t("KV cache in use"), `${(100 * (by(now, "vllm:kv_cache_usage_perc", "engine")[0]?.[1] ?? 0)).toFixed(1)} %`],
    [t("Steps by tokens"), bands(now)],
    [t("Preemptions"), value("vllm:num_preemptions_total")],
    [t("Responses"), each("gptoss_responses_total", "status")],
    [t("Background responses"), each("gptoss_background_responses", "state")],
    [t("Tool calls running"), value("gptoss_tool_calls_running")],
    [t("Tool calls waiting"), value("gptoss_tool_calls_waiting")],
    [t("Tool calls' time in the queue, mean"), mean("gptoss_tool_queue_seconds")],
    [t("Tool calls finished"), each("gptoss_tool_calls_total", "tool")],
    [t("Tool errors"), each("gptoss_tool_errors_total", "type")],
    [t("Harmony repairs"), each("gptoss_harmony_repairs_total", "kind")],
    [t("Conversations created"), value("gptoss_conversations_total")],
    [t("Store transactions"), `${value("gptoss_store_seconds_count")} (${mean("gptoss_store_seconds")})`],
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
    if (refreshes++ % FACTS_EVERY === 0) await facts(); // first: it needs the API key
    await live();
    byId("error").textContent = "";
  } catch (error) {
    refreshes = 0;
    byId("error").textContent = visible(error instanceof Error ? error.message : String(error));
  }
}

byId("key").value = key.get();
byId("key").addEventListener("change", () => {
  key.set(byId("key").value.trim());
  refreshes = 0;
  refresh();
});
refresh();
setInterval(() => document.hidden || !before || refresh(), EVERY);
