// One view per output item of a response: reasoning, answer, python call, web search, MCP call, approval.

import { download } from "./api.js";
import { copyButton, el, link, visible } from "./dom.js";
import { codeBlock, LIMIT, markdown } from "./markdown.js";

/**
 * @typedef {object} View
 * @property {HTMLElement} node
 * @property {(text: string) => void} delta adds streamed text
 * @property {(item: any) => void} done shows the finished item
 */
/** @typedef {{approve: (id: string, approve: boolean) => void, fail: (error: unknown) => void}} Actions */

/**
 * @param {any} item
 * @param {Actions} actions
 * @returns {View}
 */
export function viewOf(item, actions) {
  const make = VIEWS[item.type];
  return make ? make(item, actions) : otherView(item);
}

/** @type {Record<string, (item: any, actions: Actions) => View>} */
const VIEWS = {
  reasoning: reasoningView,
  message: messageView,
  code_interpreter_call: pythonView,
  web_search_call: searchView,
  mcp_call: mcpView,
  mcp_approval_request: approvalView,
};

/** @param {any[]} parts */
const textOf = (parts) => (parts ?? []).map((part) => part.text ?? part.refusal ?? "").join("");

function reasoningView() {
  const label = el("summary", {}, "Thinking…");
  const text = el("div", { class: "plain" });
  const began = performance.now();
  let streamed = false;
  return {
    node: el("details", { class: "reasoning" }, label, text),
    delta(/** @type {string} */ more) {
      streamed = true;
      text.append(visible(more));
    },
    done(/** @type {any} */ item) {
      text.textContent = visible(textOf(item.content) || textOf(item.summary));
      const seconds = ((performance.now() - began) / 1000).toFixed(1);
      label.textContent = streamed ? `Reasoning (${seconds} s)` : "Reasoning";
    },
  };
}

/**
 * @param {any} _
 * @param {Actions} actions
 */
function messageView(_, actions) {
  const body = el("div", { class: "answer", dir: "auto" });
  const node = el("div", { class: "message" }, body);
  let text = "";
  let timer = 0;
  let cost = 0;
  const render = () => {
    const began = performance.now();
    timer = 0;
    body.replaceChildren(markdown(text));
    cost = performance.now() - began;
  };
  return {
    node,
    delta(/** @type {string} */ more) {
      text += more;
      // The whole text is parsed again: a longer text is shown less often, so that parsing takes a tenth of the time.
      if (!timer && text.length < LIMIT) timer = setTimeout(render, Math.max(60, 10 * cost));
    },
    done(/** @type {any} */ item) {
      clearTimeout(timer);
      text = textOf(item.content);
      render();
      const notes = (item.content ?? []).flatMap((/** @type {any} */ part) => part.annotations ?? []);
      node.append(...footer(text, notes, actions));
    },
  };
}

/**
 * @param {string} text
 * @param {any[]} notes annotations
 * @param {Actions} actions
 */
function footer(text, notes, actions) {
  const sources = notes.filter((note) => note.type === "url_citation");
  const files = notes.filter((note) => note.type === "container_file_citation");
  const nodes = [copyButton(() => text)];
  if (sources.length) {
    const entry = (/** @type {any} */ note) => {
      const lines = note.lines ? ` (lines ${note.lines[0]}–${note.lines[1]})` : "";
      return el("li", {}, link(String(note.url), String(note.title || note.url)), lines);
    };
    nodes.push(el("ol", { class: "sources", "aria-label": "Sources" }, ...sources.map(entry)));
  }
  for (const file of files) {
    const save = () => download(file).catch(actions.fail);
    nodes.push(el("button", { type: "button", class: "small file", onclick: save }, `Download ${visible(file.filename)}`));
  }
  return nodes;
}

function pythonView() {
  const label = el("summary", {}, "Python…");
  const body = el("div");
  let code = el("pre");
  body.append(code);
  return {
    node: el("details", { class: "tool", open: true }, label, body),
    delta(/** @type {string} */ more) {
      code.append(visible(more));
    },
    done(/** @type {any} */ item) {
      label.textContent = item.status === "completed" ? "Python" : `Python: ${item.status}`;
      body.replaceChildren(codeBlock(item.code ?? "", "python"), ...(item.outputs ?? []).map(outputNode));
    },
  };
}

/** @param {any} output */
function outputNode(output) {
  if (output.type !== "image") return el("pre", { class: "output", tabindex: "0" }, visible(String(output.logs ?? "")));
  const isRaster = /^data:image\/(png|jpeg|gif|webp);base64,/.test(output.url);
  return isRaster ? el("img", { src: output.url, alt: "Image made by the program" }) : el("p", {}, "[image]");
}

function searchView() {
  const node = el("p", { class: "tool step" }, "Web…");
  return {
    node,
    delta() {},
    done(/** @type {any} */ item) {
      const { type, query, url, pattern } = item.action ?? {};
      const failed = item.status === "completed" ? "" : ` (${item.status})`;
      if (type === "search") node.textContent = visible(`Searched: ${query}${failed}`);
      else if (type === "find_in_page") node.replaceChildren(visible(`Looked for “${pattern}” in `), link(url, url), failed);
      else node.replaceChildren("Opened ", link(url ?? "", url ?? ""), failed);
    },
  };
}

function mcpView() {
  const label = el("summary", {}, "Tool…");
  const body = el("div");
  return {
    node: el("details", { class: "tool" }, label, body),
    delta() {},
    done(/** @type {any} */ item) {
      const failed = item.status === "completed" ? "" : `: ${item.status}`;
      label.textContent = visible(`${item.server_label}.${item.name}${failed}`);
      const output = item.output ?? textOf(item.error?.content) ?? "";
      body.replaceChildren(codeBlock(item.arguments ?? "", "arguments"), codeBlock(output, "output"));
    },
  };
}

/**
 * @param {any} item
 * @param {Actions} actions
 */
function approvalView(item, actions) {
  const buttons = [true, false].map((approve) =>
    el("button", { type: "button", onclick: () => answer(approve) }, approve ? "Approve" : "Deny"),
  );
  const row = el("div", {}, ...buttons);
  const body = el("div");
  function answer(/** @type {boolean} */ approve) {
    row.replaceChildren(approve ? "Approved" : "Denied");
    actions.approve(item.id, approve);
  }
  return {
    node: el("section", { class: "tool approval", "aria-label": "Approval" }, body, row),
    delta() {},
    done(/** @type {any} */ whole) {
      const title = visible(`May the model call ${whole.server_label}.${whole.name}?`);
      body.replaceChildren(el("p", {}, title), codeBlock(whole.arguments ?? "", "arguments"));
    },
  };
}

/** @param {any} item */
function otherView(item) {
  const body = el("div");
  return {
    node: el("details", { class: "tool" }, el("summary", {}, visible(String(item.type))), body),
    delta() {},
    done(/** @type {any} */ whole) {
      body.replaceChildren(codeBlock(JSON.stringify(whole, null, 1).slice(0, LIMIT), "json"));
    },
  };
}
