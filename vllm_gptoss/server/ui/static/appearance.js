// Language and theme: the selects of both pages, and the translation of texts.

import { CHINESE } from "./chinese.js";

const LANGUAGE = "gptoss.language";
const THEME = "gptoss.theme";
const language = localStorage.getItem(LANGUAGE) ?? (navigator.language.startsWith("zh") ? "zh" : "en");

/**
 * `text` in the page's language; each `{}` is replaced by a value.
 * @param {string} text in English
 * @param {...(string | number)} values
 */
export function t(text, ...values) {
  const translated = language === "zh" ? (CHINESE[text] ?? text) : text;
  return translated.replace(/\{\}/g, () => String(values.shift()));
}

/** Translates the texts of the HTML file. */
function translatePage() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    const text = node.nodeValue ?? "";
    node.nodeValue = text.replace(text.trim(), t(text.trim()));
  }
  for (const name of ["aria-label", "placeholder"]) {
    for (const node of document.querySelectorAll(`[${name}]`)) node.setAttribute(name, t(node.getAttribute(name) ?? ""));
  }
}

/**
 * @param {string} id of the select
 * @param {string} value
 * @param {(value: string) => void} changed
 */
function select(id, value, changed) {
  const node = /** @type {HTMLSelectElement} */ (document.getElementById(id));
  node.value = value;
  node.addEventListener("change", () => changed(node.value));
}

/** @param {string} theme light, dark, or "light dark" for the system's */
function setTheme(theme) {
  document.documentElement.style.colorScheme = theme;
  localStorage.setItem(THEME, theme);
}

translatePage();
setTheme(localStorage.getItem(THEME) ?? "light dark");
select("theme", localStorage.getItem(THEME) ?? "light dark", setTheme);
select("language", language, (value) => {
  localStorage.setItem(LANGUAGE, value);
  location.reload();
});
