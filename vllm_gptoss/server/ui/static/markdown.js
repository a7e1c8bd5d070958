// Markdown to DOM nodes, from markdown-it's tokens. HTML in the text stays text; no HTML string is ever parsed.

import "./vendor/markdown-it.min.js";
import { codeBlock } from "./code.js";
import { el, link, visible } from "./dom.js";
import { formula, formulaRule } from "./formulas.js";

const parser = /** @type {any} */ (globalThis).markdownit({ html: false, linkify: false, maxNesting: 50 });
parser.inline.ruler.before("escape", "formula", formulaRule);
const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote table thead tbody tr th td em strong s".split(" "),
);
/** Characters; longer text is shown unformatted. */
export const LIMIT = 100_000;

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function markdown(text) {
  const root = document.createDocumentFragment();
  if (text.length > LIMIT) root.append(el("pre", { class: "plain" }, visible(text)));
  else build(root, parser.parse(text, {}));
  return root;
}

/**
 * @param {Node} root
 * @param {any[]} tokens
 */
function build(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const top = open[open.length - 1];
    if (token.type === "inline") build(top, token.children);
    else if (token.nesting === 1) top.appendChild(open[open.push(opened(token)) - 1]);
    else if (token.nesting === -1) open.pop();
    else top.appendChild(leaf(token));
  }
}

/** @param {any} token */
function opened(token) {
  if (token.type === "link_open") return link(token.attrGet("href") ?? "", "");
  if (token.type === "paragraph_open" && token.hidden) return el("span");
  if (token.tag === "table") return el("table", { tabindex: "0" }); // it may scroll
  const start = token.tag === "ol" && token.attrGet("start");
  return el(TAGS.has(token.tag) ? token.tag : "div", start ? { start: String(start) } : {});
}

/** @param {any} token */
function leaf(token) {
  switch (token.type) {
    case "softbreak":
      return document.createTextNode("\n");
    case "hardbreak":
      return el("br");
    case "hr":
      return el("hr");
    case "code_inline":
      return el("code", {}, visible(token.content));
    case "fence":
    case "code_block":
      return codeBlock(token.content, token.info);
    case "formula":
      return formula(token.content, token.block);
    case "image":
      return link(token.attrGet("src") ?? "", token.content || "image"); // loading it would reveal the reader's address
    default:
      return document.createTextNode(visible(token.content));
  }
}
