// A worker: splits code into spans of one syntactic scope. Hostile code can make the parser slow, so it has a thread.

const scope = /** @type {any} */ (globalThis);
scope.importScripts("vendor/highlight.min.js");

/** An emitter of highlight.js that collects `[scope, text]` in place of HTML. */
class Spans {
  /** @type {[string, string][]} */
  spans = [];
  /** @type {string[]} */
  #open = [];

  /** @param {string} text */
  addText(text) {
    if (text) this.spans.push([this.#open.at(-1) ?? "", text]);
  }
  /** @param {string} name */
  openNode(name) {
    this.#open.push(name);
  }
  closeNode() {
    this.#open.pop();
  }
  startScope = this.openNode;
  endScope = this.closeNode;
  /** @param {Spans} inner spans of another language, as JavaScript in HTML */
  __addSublanguage(inner) {
    this.spans.push(...inner.spans);
  }
  toHTML() {
    return "";
  }
  finalize() {}
}

scope.hljs.configure({ __emitter: Spans });
scope.onmessage = (/** @type {MessageEvent<{code: string, language: string}>} */ { data: { code, language } }) => {
  const known = scope.hljs.getLanguage(language);
  scope.postMessage(known ? scope.hljs.highlight(code, { language, ignoreIllegals: true })._emitter.spans : []);
};
