// The conversations that the server keeps for this API key: their list, and their items.

import { getJson, request } from "./api.js";
import { t } from "./appearance.js";
import { byId, el, visible } from "./dom.js";

const PAGE = 100;
const AT_ONCE = 20; // items of one request that adds some

/** @typedef {{current: () => string, open: (id: string) => Promise<void>, fail: (error: unknown) => void}} Chat */

/**
 * @param {Chat} chat
 * @param {string} after the last conversation that is shown; empty to begin
 */
export async function listConversations(chat, after = "") {
  const page = await getJson(`conversations?limit=50${after && `&after=${after}`}`);
  const entries = page.data.map((/** @type {any} */ each) => entry(each, chat));
  const list = byId("conversations");
  if (after) list.append(...entries);
  else list.replaceChildren(...entries);
  byId("more").hidden = !page.has_more;
  byId("more").onclick = () => listConversations(chat, page.last_id).catch(chat.fail);
}

/**
 * @param {any} each
 * @param {Chat} chat
 */
function entry(each, chat) {
  const title = visible(each.metadata?.title || new Date(each.created_at * 1000).toLocaleString());
  const remove = async () => {
    try {
      await request("DELETE", `conversations/${each.id}`);
      await (each.id === chat.current() ? chat.open("") : listConversations(chat));
    } catch (error) {
      chat.fail(error);
    }
  };
  const current = each.id === chat.current() && { "aria-current": "true" };
  return el(
    "li",
    {},
    el("button", { type: "button", class: "title", onclick: () => chat.open(each.id), ...current }, title),
    el("button", { type: "button", class: "small", "aria-label": t("Delete {}", title), onclick: remove }, "✕"),
  );
}

/**
 * @param {string} title
 * @returns {Promise<string>} the id of a new conversation
 */
export async function create(title) {
  const made = await request("POST", "conversations", { metadata: { title: [...title].slice(0, 100).join("") } });
  return (await made.json()).id;
}

/**
 * Up to 100 items before the item `before`, oldest first.
 * @param {string} id
 * @param {string} before an item's id; empty for the newest items
 * @returns {Promise<{items: any[], hasMore: boolean}>}
 */
export async function itemsBefore(id, before) {
  const after = before && `&after=${encodeURIComponent(before)}`;
  const page = await getJson(`conversations/${id}/items?order=desc&limit=${PAGE}${after}`);
  return { items: page.data.reverse(), hasMore: page.has_more };
}

/**
 * Copies the items before the item `end` into a new conversation.
 * @param {string} id
 * @param {string} end
 * @param {string} title
 * @returns {Promise<string>} the id of the new conversation
 */
export async function branch(id, end, title) {
  /** @type {any[]} */
  let items = [];
  for (let hasMore = true; hasMore; ) {
    const page = await itemsBefore(id, items[0]?.id ?? end);
    items = [...page.items, ...items];
    hasMore = page.hasMore;
  }
  const made = await create(title);
  for (let at = 0; at < items.length; at += AT_ONCE) {
    await request("POST", `conversations/${made}/items`, { items: items.slice(at, at + AT_ONCE) });
  }
  return made;
}

/**
 * Removes the last message of the user with everything after it.
 * @param {string} id
 */
export async function removeLastTurn(id) {
  const { items } = await itemsBefore(id, "");
  const begin = items.findLastIndex((item) => item.role === "user");
  if (begin < 0) throw new Error(t("The last turn has too many items."));
  for (const item of items.slice(begin)) await request("DELETE", `conversations/${id}/items/${encodeURIComponent(item.id)}`);
}
