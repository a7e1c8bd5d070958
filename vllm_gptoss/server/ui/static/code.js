// Blocks of code: their language, a button that copies them, and syntax colours.

import { copyButton, el, visible } from "./dom.js";

const LONGEST = 50_000; // characters; longer code has no colours
const PATIENCE = 5000; // ms; slower code has no colours
/** @type {Record<string, string>} */
const LANGUAGES = { arguments: "json" };
/** @type {Worker | null} */
let worker = null;
/** @type {Promise<void>} */
let queue = Promise.resolve();

/**
 * @param {string} code
 * @param {string} [language]
 */
export function codeBlock(code, language = "") {
  const head = el("div", { class: "head" }, el("span", {}, visible(language.slice(0, 40))), copyButton(() => code));
  const name = language.trim().split(/[\s,{]/)[0].toLowerCase();
  const text = el("code", { "data-language": LANGUAGES[name] ?? name }, visible(code));
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, text));
}

/**
 * Gives the blocks of code in a finished node their colours, one block after the other.
 * @param {HTMLElement} root
 */
export function colour(root) {
  for (const node of root.querySelectorAll(".code code:not([data-language=''])")) {
    queue = queue.then(() => colourBlock(/** @type {HTMLElement} */ (node)));
  }
}

/** @param {HTMLElement} node */
async function colourBlock(node) {
  const code = node.textContent ?? "";
  if (!code || code.length > LONGEST || !node.isConnected) return;
  const spans = await spansOf(code, node.dataset.language ?? "");
  if (spans.map((span) => span[1]).join("") !== code) return;
  node.replaceChildren(
    ...spans.map(([scope, text]) => (scope ? el("span", { class: `hl-${scope.split(".")[0]}` }, text) : text)),
  );
}

/**
 * @param {string} code
 * @param {string} language
 * @returns {Promise<[string, string][]>} scope and text of each span; none for an unknown language, or too slow code
 */
function spansOf(code, language) {
  const asked = (worker ??= new Worker(new URL("highlight_worker.js", import.meta.url)));
  return new Promise((resolve) => {
    const giveUp = () => {
      clearTimeout(timer);
      asked.terminate();
      worker = null;
      resolve([]);
    };
    const timer = setTimeout(giveUp, PATIENCE);
    asked.onerror = giveUp;
    asked.onmessage = ({ data }) => {
      clearTimeout(timer);
      resolve(data);
    };
    asked.postMessage({ code, language });
  });
}
