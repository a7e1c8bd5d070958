// Formulas in Markdown: `$x$`, `$$x$$`, `\(x\)` and `\[x\]` become MathML.

import "./vendor/katex.min.js";
import { el, visible } from "./dom.js";

const LONGEST = 2000; // characters; a longer formula is shown as text
const MARKS = [
  ["$$", "$$"],
  ["\\[", "\\]"],
  ["\\(", "\\)"],
  ["$", "$"],
];

/**
 * A rule of markdown-it: reads a formula at `state.pos`.
 * @param {any} state
 * @param {boolean} silent
 */
export function formulaRule(state, silent) {
  const { src, pos } = state;
  const marks = MARKS.find(([open]) => src.startsWith(open, pos));
  if (!marks) return false;
  const [open, close] = marks;
  const from = pos + open.length;
  const to = src.slice(from, from + LONGEST).indexOf(close);
  const tex = src.slice(from, from + to);
  // As in Pandoc: `$` beside a space, or before a digit, is a currency.
  const isCurrency = open === "$" && (/^\s|\s$|^$/.test(tex) || /\d/.test(src[from + to + 1] ?? ""));
  if (to < 1 || isCurrency) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = tex;
    token.block = open === "$$" || open === "\\[";
  }
  state.pos = from + to + close.length;
  return true;
}

/**
 * @param {string} tex
 * @param {boolean} displayMode whether the formula has its own line
 */
export function formula(tex, displayMode) {
  const node = el("span", { class: "formula" });
  try {
    const options = { displayMode, output: "mathml", trust: false, maxSize: 20, maxExpand: 200 };
    /** @type {any} */ (globalThis).katex.render(tex, node, options);
  } catch {
    node.replaceChildren(el("code", {}, visible(tex))); // no valid TeX
  }
  return node;
}
