// The chat: the conversation on the screen, the composer, and the response that runs.

import { ApiError, BASE, getJson, key, request } from "./api.js";
import { t } from "./appearance.js";
import { attach, putFiles, takeFiles } from "./attachments.js";
import { branch, create, itemsBefore, listConversations, removeLastTurn } from "./conversations.js";
import { byId, copyButton, el, visible } from "./dom.js";
import { chosen, readServer, saveOptions } from "./options.js";
import { curl, python } from "./snippets.js";
import { Turn } from "./turn.js";

const RUNNING = "gptoss.running"; // {conversation, response, text} of the response that a reload continues
const INCLUDE = ["code_interpreter_call.outputs", "web_search_call.action.sources"];

const log = byId("log");
const prompt = byId("prompt");
let conversation = location.hash.slice(1);
/** @type {Turn | null} */
let running = null;
/** @type {Turn[]} */
let turns = [];

const chat = { current: () => conversation, open, fail: show };
const actions = {
  approve: (/** @type {string} */ id, /** @type {boolean} */ approve) => {
    if (running) return false;
    run([], { type: "mcp_approval_response", approval_request_id: id, approve });
    return true;
  },
  fail: show,
};

/** @param {unknown} error */
function show(error) {
  byId("error").textContent = error ? visible(error instanceof Error ? error.message : String(error)) : "";
  if (error instanceof ApiError && error.status === 401) {
    byId("options").open = true;
    byId("key").focus();
    byId("key").select();
  }
}

/** @param {any[]} content */
const message = (content) => ({ type: "message", role: "user", content });

/**
 * Sends a message, or the answer to a request for approval, and shows the response.
 * @param {any[]} content parts of the message
 * @param {object} [item]
 */
async function run(content, item) {
  if (running) return;
  show(null);
  const turn = (running = new Turn(content, actions));
  turns.push(turn);
  log.append(turn.node);
  update();
  turn.node.scrollIntoView({ block: "end" });
  try {
    if (!conversation) {
      conversation = await create(turn.text);
      history.replaceState(null, "", `#${conversation}`);
    }
    const input = [item ?? message(content)];
    const body = { ...chosen(), input, conversation, include: INCLUDE, stream: true, background: true, store: true };
    await watch(turn, await request("POST", "responses", body));
  } catch (error) {
    failed(turn, error);
    if (!turn.response && !prompt.value) edit(content);
  }
  await finished(turn);
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

/** @param {Turn} turn */
async function finished(turn) {
  running = null;
  sessionStorage.removeItem(RUNNING);
  update();
  try {
    await listConversations(chat);
    const stored = turn.response && (await itemsBefore(conversation, "")).items.findLast((item) => item.role === "user");
    if (stored?.content?.at(-1)?.text !== turn.text) return; // the response ended before its input was stored
    turn.item = stored.id;
    turn.content = stored.content;
    update();
  } catch (error) {
    show(error);
  }
}

/** Shows which buttons have an effect now. */
function update() {
  byId("stop").hidden = !running;
  byId("send").disabled = Boolean(running);
  for (const turn of turns) turn.buttons.replaceChildren(...(running || !turn.text ? [] : buttonsOf(turn)));
}

/** @param {Turn} turn */
function buttonsOf(turn) {
  const url = BASE.href.replace(/\/$/, "");
  const button = (/** @type {string} */ label, /** @type {() => void} */ onclick) =>
    el("button", { type: "button", class: "small", onclick }, t(label));
  const body = () => ({ model: byId("model").textContent, ...chosen(), input: [message(turn.content)] });
  const nodes = [copyButton(() => curl(url, body()), "Copy as curl"), copyButton(() => python(url, body()), "Copy as Python")];
  if (turn.item) nodes.unshift(button("Branch", () => branchAt(turn)));
  if (turn !== turns.at(-1)) return nodes;
  return [button("Regenerate", () => again(true)), button("Edit", () => again(false)), ...nodes];
}

/**
 * Removes the last turn from the conversation and sends its message again, or puts it into the composer.
 * @param {boolean} sends
 */
async function again(sends) {
  const last = turns.at(-1);
  if (!last || running) return;
  try {
    if (last.item) await removeLastTurn(conversation);
  } catch (error) {
    return show(error);
  }
  last.node.remove();
  turns.pop();
  if (sends) return run(last.content);
  edit(last.content);
  update();
}

/**
 * Continues in a new conversation, with the items before a turn, whose message can be edited.
 * @param {Turn} turn
 */
async function branchAt(turn) {
  try {
    await open(await branch(conversation, turn.item, turn.text));
    edit(turn.content);
  } catch (error) {
    show(error);
  }
}

/** @param {any[]} content of a message, for the composer */
function edit(content) {
  putFiles(content.slice(0, -1));
  prompt.value = content.at(-1)?.text ?? "";
  prompt.focus();
}

async function stop() {
  if (running?.response) await request("POST", `responses/${running.response}/cancel`).catch(show);
}

/**
 * The turns of stored items.
 * @param {any[]} items oldest first
 */
function turnsOf(items) {
  const approvals = items.filter((item) => item.type === "mcp_approval_response");
  const answers = new Map(approvals.map((item) => [item.approval_request_id, item.approve]));
  /** @type {Turn[]} */
  const found = [];
  for (const item of items) {
    const isUser = item.type === "message" && item.role !== "assistant";
    if (isUser || !found.length) {
      const turn = new Turn(isUser ? (item.content ?? []) : [], actions);
      turn.response = "stored";
      turn.item = isUser ? item.id : "";
      found.push(turn);
    }
    if (isUser || item.type === "mcp_approval_response") continue;
    found[found.length - 1].add({ ...item, answered: answers.get(item.id) });
  }
  return found;
}

/**
 * Shows the stored items of the conversation before the item `before`.
 * @param {string} before empty for the newest
 */
async function load(before = "") {
  if (!before) {
    turns = [];
    log.replaceChildren();
  }
  byId("earlier").hidden = true;
  if (!conversation) return update();
  const { items, hasMore } = await itemsBefore(conversation, before);
  const older = turnsOf(items);
  turns = [...older, ...turns];
  log.prepend(...older.map((turn) => turn.node));
  byId("earlier").hidden = !hasMore;
  byId("earlier").onclick = () => load(items[0].id).catch(show);
  update();
  if (!before) turns.at(-1)?.node.scrollIntoView({ block: "end" });
}

/** @param {string} id empty for a new conversation */
async function open(id) {
  if (running) return show(t("Stop the answer first."));
  show(null);
  conversation = id;
  history.replaceState(null, "", id ? `#${id}` : location.pathname);
  await load().catch(show);
  await listConversations(chat).catch(show);
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
  const turn = (running = new Turn([{ type: "input_text", text: left.text }], actions));
  turns.push(turn);
  log.append(turn.node);
  turn.response = left.response;
  update();
  await watch(turn, null).catch((error) => failed(turn, error));
  await finished(turn);
}

async function begin() {
  await readServer();
  await load();
  await listConversations(chat);
  await resume();
}

byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  run([...takeFiles(), { type: "input_text", text }]);
});
prompt.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("file").addEventListener("change", () => {
  attach([...byId("file").files]).catch(show);
  byId("file").value = "";
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
