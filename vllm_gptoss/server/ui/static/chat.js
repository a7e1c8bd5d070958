// The chat: options, composer, the conversation on the screen and the list of conversations.

import { ApiError, getJson, key, request } from "./api.js";
import { byId, el, visible } from "./dom.js";
import { Turn } from "./turn.js";

const OPTIONS = "gptoss.options";
const RUNNING = "gptoss.running"; // {conversation, response, text} of the response that a reload continues
const INCLUDE = ["code_interpreter_call.outputs", "web_search_call.action.sources"];
const MOST_ITEMS = 2000;

const log = byId("log");
const prompt = byId("prompt");
let conversation = location.hash.slice(1);
/** @type {Turn | null} */
let running = null;
/** @type {Turn[]} */
let turns = [];

const actions = {
  approve: (/** @type {string} */ id, /** @type {boolean} */ approve) =>
    run("", { type: "mcp_approval_response", approval_request_id: id, approve }),
  fail: show,
};

/** @param {unknown} error */
function show(error) {
  byId("error").textContent = error ? visible(error instanceof Error ? error.message : String(error)) : "";
  if (error instanceof ApiError && error.status === 401) {
    byId("options").open = true;
    byId("key").focus();
  }
}

/**
 * @param {string} text
 * @returns {Turn}
 */
function addTurn(text) {
  const turn = new Turn(text, actions);
  turns.push(turn);
  log.append(turn.node);
  return turn;
}

/** The fields of a request that the options choose. */
function chosen() {
  /** @type {any} */
  const fields = { reasoning: { effort: byId("effort").value }, tools: [] };
  if (byId("instructions").value.trim()) fields.instructions = byId("instructions").value;
  for (const box of document.querySelectorAll("#tools input:checked")) {
    fields.tools.push(JSON.parse(/** @type {HTMLInputElement} */ (box).value));
  }
  return fields;
}

/**
 * Sends a message, or another input item, and shows the response.
 * @param {string} text
 * @param {object} [item]
 */
async function run(text, item) {
  if (running) return;
  show(null);
  const turn = (running = addTurn(text));
  update();
  turn.node.scrollIntoView({ block: "end" });
  try {
    if (!conversation) {
      const made = await request("POST", "conversations", { metadata: { title: [...text].slice(0, 100).join("") } });
      conversation = (await made.json()).id;
      history.replaceState(null, "", `#${conversation}`);
    }
    const input = [item ?? { role: "user", content: text }];
    const body = { ...chosen(), input, conversation, include: INCLUDE, stream: true, background: true, store: true };
    await watch(turn, await request("POST", "responses", body));
  } catch (error) {
    failed(turn, error);
    prompt.value ||= text;
  }
  finished();
}

/**
 * @param {Turn} turn
 * @param {Response | null} answer
 */
async function watch(turn, answer) {
  await turn.follow(answer, (response) => {
    sessionStorage.setItem(RUNNING, JSON.stringify({ conversation, response, text: turn.text }));
    update();
  });
}

/**
 * @param {Turn} turn
 * @param {unknown} error
 */
function failed(turn, error) {
  turn.fail(error);
  show(error);
}

function finished() {
  running = null;
  sessionStorage.removeItem(RUNNING);
  update();
  listConversations().catch(show);
}

/** Shows which buttons have an effect now. */
function update() {
  byId("stop").hidden = !running;
  byId("send").disabled = Boolean(running);
  for (const turn of turns) turn.buttons.replaceChildren();
  const last = turns.at(-1);
  if (running || !last?.text) return;
  last.buttons.append(
    el("button", { type: "button", class: "small", onclick: () => again(true) }, "Regenerate"),
    el("button", { type: "button", class: "small", onclick: () => again(false) }, "Edit"),
  );
}

/**
 * Removes the last turn from the conversation and sends its message again, or puts it into the composer.
 * @param {boolean} sends
 */
async function again(sends) {
  const last = turns.at(-1);
  if (!last || running) return;
  try {
    if (last.response) {
      const found = await getJson(`conversations/${conversation}/items?order=desc&limit=100`);
      const at = found.data.findIndex((/** @type {any} */ item) => item.role === "user");
      for (const item of found.data.slice(0, at + 1)) {
        await request("DELETE", `conversations/${conversation}/items/${encodeURIComponent(item.id)}`);
      }
    }
  } catch (error) {
    return show(error);
  }
  last.node.remove();
  turns.pop();
  if (sends) return run(last.text);
  prompt.value = last.text;
  prompt.focus();
  update();
}

async function stop() {
  if (running?.response) await request("POST", `responses/${running.response}/cancel`).catch(show);
}

/** Shows the stored items of the conversation. */
async function load() {
  turns = [];
  log.replaceChildren();
  let after = "";
  for (let count = 0; conversation && count < MOST_ITEMS; count += 100) {
    const page = await getJson(`conversations/${conversation}/items?order=asc&limit=100${after}`);
    for (const item of page.data) {
      const isUser = item.type === "message" && item.role !== "assistant";
      if (isUser) addTurn((item.content ?? []).map((/** @type {any} */ part) => part.text ?? `[${part.type}]`).join(""));
      else if (item.type !== "mcp_approval_response") (turns.at(-1) ?? addTurn("")).add(item);
      if (turns.length) turns[turns.length - 1].response = "stored";
    }
    if (!page.has_more) break;
    after = `&after=${encodeURIComponent(page.last_id)}`;
  }
  update();
}

/**
 * @param {string} id empty for a new conversation
 */
async function open(id) {
  if (running) return show("Stop the answer first.");
  show(null);
  conversation = id;
  history.replaceState(null, "", id ? `#${id}` : location.pathname);
  await load().catch(show);
  await listConversations().catch(show);
  prompt.focus();
}

/** Continues the response that ran when the page was left. */
async function resume() {
  const left = JSON.parse(sessionStorage.getItem(RUNNING) ?? "null");
  if (!left || left.conversation !== conversation) return;
  const { status } = await getJson(`responses/${left.response}`);
  if (status !== "queued" && status !== "in_progress") {
    sessionStorage.removeItem(RUNNING);
    return load(); // it may have ended after its conversation was read
  }
  const turn = (running = addTurn(left.text));
  turn.response = left.response;
  update();
  await watch(turn, null).catch((error) => failed(turn, error));
  finished();
}

async function listConversations(after = "") {
  const page = await getJson(`conversations?limit=50${after}`);
  const list = byId("conversations");
  if (!after) list.replaceChildren();
  for (const each of page.data) list.append(entry(each));
  byId("more").hidden = !page.has_more;
  byId("more").onclick = () => listConversations(`&after=${page.last_id}`).catch(show);
}

/** @param {any} each */
function entry(each) {
  const title = visible(each.metadata?.title || new Date(each.created_at * 1000).toLocaleString());
  const remove = async () => {
    await request("DELETE", `conversations/${each.id}`).catch(show);
    await (each.id === conversation ? open("") : listConversations().catch(show));
  };
  const current = each.id === conversation && { "aria-current": "true" };
  return el(
    "li",
    {},
    el("button", { type: "button", class: "title", onclick: () => open(each.id), ...current }, title),
    el("button", { type: "button", class: "small", "aria-label": `Delete ${title}`, onclick: remove }, "✕"),
  );
}

/** The tools that this server has, as check boxes. */
async function listTools() {
  const server = await getJson("ui/server");
  byId("model").textContent = server.model;
  /** @type {[string, object][]} */
  const tools = [];
  for (const provider of server.tools.filter((/** @type {any} */ each) => !each.unavailable)) {
    for (const { name, kind } of provider.namespaces) {
      if (kind === "python") tools.push(["Python", { type: "code_interpreter", container: { type: "auto" } }]);
      else if (kind === "browser") tools.push(["Web", { type: "web_search" }]);
      else tools.push([name, { type: "mcp", server_label: name }]);
    }
  }
  const saved = JSON.parse(localStorage.getItem(OPTIONS) ?? "{}");
  byId("effort").value = saved.effort ?? "medium";
  byId("instructions").value = saved.instructions ?? "";
  const boxes = tools.map(([label, tool]) => {
    const checked = saved.tools ? saved.tools.includes(label) : label === "Python";
    return el("label", {}, el("input", { type: "checkbox", name: label, value: JSON.stringify(tool), checked }), visible(label));
  });
  byId("tools").replaceChildren(el("legend", {}, "Tools"), ...boxes);
}

function saveOptions() {
  const tools = [...document.querySelectorAll("#tools input:checked")].map((box) => box.getAttribute("name"));
  const saved = { effort: byId("effort").value, instructions: byId("instructions").value, tools };
  localStorage.setItem(OPTIONS, JSON.stringify(saved));
}

async function begin() {
  await listTools();
  await load();
  await listConversations();
  await resume();
}

byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  run(text);
});
prompt.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => open(""));
byId("options").addEventListener("change", (/** @type {Event} */ event) => {
  if (event.target !== byId("key")) return saveOptions();
  key.set(byId("key").value.trim());
  show(null);
  begin().catch(show);
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
byId("key").value = key.get();
begin().catch(show);
