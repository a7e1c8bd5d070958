// One view per output item of a response: reasoning, answer, python call, web search, MCP call, approval.

import { download } from "./api.js";
import { t } from "./appearance.js";
import { codeBlock } from "./code.js";
import { copyButton, el, link, visible } from "./dom.js";
import { LIMIT, markdown } from "./markdown.js";

/**
 * @typedef {object} View
 * @property {HTMLElement} node
 * @property {(text: string) => void} delta adds streamed text
 * @property {(item: any) => void} done shows the finished item
 */
/** @typedef {{approve: (id: string, approve: boolean) => boolean, fail: (error: unknown) => void}} Actions */

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
  const label = el("summary", {}, t("Thinking…"));
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
      label.textContent = streamed ? t("Reasoning ({} s)", seconds) : t("Reasoning");
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
      const lines = note.lines ? ` (${t("lines {} to {}", ...note.lines)})` : "";
      return el("li", {}, link(placeOf(note), String(note.title || note.url)), lines);
    };
    nodes.push(el("ol", { class: "sources", "aria-label": t("Sources") }, ...sources.map(entry)));
  }
  for (const file of files) {
    const save = () => download(file).catch(actions.fail);
    nodes.push(el("button", { type: "button", class: "small file", onclick: save }, t("Download {}", visible(file.filename))));
  }
  return nodes;
}

/**
 * The cited page at its first cited line, by a text fragment of the URL, which browsers find and mark.
 * @param {any} note
 * @returns {string}
 */
function placeOf(note) {
  const text = String(note.quote ?? "").replace(/【\d+†|†[^】]*】|[】#*`]/g, "").trim();
  const fragment = encodeURIComponent(text).replaceAll("-", "%2D");
  return text && !note.url.includes("#") ? `${note.url}#:~:text=${fragment}` : String(note.url);
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
  return isRaster ? el("img", { src: output.url, alt: t("Image made by the program") }) : el("p", {}, "[image]");
}

function searchView() {
  const node = el("p", { class: "tool step" }, t("Web…"));
  return {
    node,
    delta() {},
    done(/** @type {any} */ item) {
      const { type, query, url, pattern } = item.action ?? {};
      const failed = item.status === "completed" ? "" : ` (${item.status})`;
      if (type === "search") node.textContent = visible(t("Searched: {}", query)) + failed;
      else if (type === "find_in_page") node.replaceChildren(visible(t("Looked for “{}” in ", pattern)), link(url, url), failed);
      else node.replaceChildren(t("Opened "), link(url ?? "", url ?? ""), failed);
    },
  };
}

function mcpView() {
  const label = el("summary", {}, t("Tool…"));
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
    el("button", { type: "button", onclick: () => answer(approve) }, t(approve ? "Approve" : "Deny")),
  );
  const row = el("div", {}, ...buttons);
  const body = el("div");
  const settle = (/** @type {boolean} */ approve) => row.replaceChildren(t(approve ? "Approved" : "Denied"));
  function answer(/** @type {boolean} */ approve) {
    if (actions.approve(item.id, approve)) settle(approve);
  }
  return {
    node: el("section", { class: "tool approval", "aria-label": t("Approval") }, body, row),
    delta() {},
    done(/** @type {any} */ whole) {
      const title = visible(t("May the model call {}?", `${whole.server_label}.${whole.name}`));
      body.replaceChildren(el("p", {}, title), codeBlock(whole.arguments ?? "", "arguments"));
      if (whole.answered !== undefined) settle(whole.answered);
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
