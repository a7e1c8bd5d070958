// Creates DOM nodes. Text from the model, pages and programs only ever becomes text nodes.

import { t } from "./appearance.js";

/**
 * @param {string} tag
 * @param {Record<string, string | boolean | EventListener>} [attributes] `on…` adds an event listener
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/**
 * @param {string} id
 * @returns {any}
 */
export const byId = (id) => document.getElementById(id);

/**
 * Replaces control characters that reorder text by their code, so that code and links read as they are.
 * @param {string} text
 */
export const visible = (text) =>
  text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (c) => `[U+${c.charCodeAt(0).toString(16).toUpperCase()}]`);

/**
 * A button that copies text.
 * @param {() => string} text
 * @param {string} label in English
 */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "small", onclick: copy }, t(label));
  async function copy() {
    await navigator.clipboard?.writeText(text()).catch(() => copySelected(text()));
    if (!navigator.clipboard) copySelected(text());
    button.textContent = t("Copied");
    setTimeout(() => (button.textContent = t(label)), 1500);
  }
  return button;
}

/**
 * Copies without `navigator.clipboard`, which browsers give only to HTTPS and localhost, and may deny.
 * @param {string} text
 */
function copySelected(text) {
  const area = /** @type {HTMLTextAreaElement} */ (el("textarea"));
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/**
 * A link to another host, or plain text where the URL has another scheme than http and https.
 * @param {string} url
 * @param {string} label
 */
export function link(url, label) {
  if (!/^https?:\/\//i.test(url)) return el("span", { class: "source" }, visible(label));
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: visible(url) }, visible(label));
}
