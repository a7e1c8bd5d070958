// One turn: the user's message and the items of its response, filled from the response's event stream.

import { events, request } from "./api.js";
import { t } from "./appearance.js";
import { nameOf } from "./attachments.js";
import { colour } from "./code.js";
import { el, visible } from "./dom.js";
import { viewOf } from "./items.js";

const ENDS = ["response.completed", "response.incomplete", "response.failed", "response.cancelled", "error"];
const RETRIES = 33; // the last after two minutes
const LONGEST_DELAY = 4000; // ms between two of them

export class Turn {
  /**
   * @param {any[]} content parts of the user's message: files, then its text; empty for an approval
   * @param {import("./items.js").Actions} actions
   */
  constructor(content, actions) {
    this.content = content;
    this.actions = actions;
    /** @type {Map<number, import("./items.js").View>} */
    this.views = new Map();
    this.last = -1;
    this.began = performance.now();
    this.first = 0;
    this.ended = false;
    this.response = "";
    this.item = ""; // the id of the stored message
    this.items = el("div", { class: "items" });
    this.note = el("p", { class: "note", role: "status" });
    this.buttons = el("div", { class: "buttons" });
    this.node = el("article", { class: "turn" });
    if (content.length) this.node.append(el("div", { class: "user", dir: "auto" }, ...content.map(partNode)));
    this.node.append(this.items, this.note, this.buttons);
  }

  /** The text of the user's message. */
  get text() {
    return String(this.content.at(-1)?.text ?? "");
  }

  /**
   * Shows a finished item.
   * @param {any} item
   */
  add(item) {
    const view = viewOf(item, this.actions);
    this.items.append(view.node);
    finish(view, item);
  }

  /**
   * Shows a response until it ends. A lost connection is continued after the last event.
   * @param {Response | null} answer the stream; null to read a running response from its start
   * @param {(response: string) => void} started called with the response's id
   */
  async follow(answer, started) {
    let delay = 250;
    for (let tries = 0; ; tries++, delay = Math.min(2 * delay, LONGEST_DELAY)) {
      try {
        answer ??= await request("GET", `responses/${this.response}?stream=true&starting_after=${this.last}`);
        for await (const event of events(answer)) {
          tries = 0;
          delay = 250;
          this.take(event);
          if (event.type === "response.created") started(this.response);
          if (this.ended) return;
        }
      } catch (error) {
        if (!(error instanceof TypeError) || !this.response) throw error; // fetch's error of a lost connection
      }
      if (tries >= RETRIES || !this.response) throw new Error(t("The connection was lost."));
      this.note.textContent = t("The connection was lost. Reconnecting…");
      await new Promise((resolve) => setTimeout(resolve, delay));
      answer = null;
    }
  }

  /** @param {any} event */
  take(event) {
    if (event.sequence_number <= this.last) return;
    this.last = event.sequence_number;
    const { type } = event;
    if (type === "response.created") this.response = event.response.id;
    else if (type === "response.output_item.added") {
      const view = viewOf(event.item, this.actions);
      this.views.set(event.output_index, view);
      this.items.append(view.node);
    } else if (type === "response.output_item.done") finish(this.views.get(event.output_index), event.item);
    else if (type.endsWith(".delta")) {
      this.first ||= performance.now();
      this.note.textContent = "";
      if (!type.includes("summary")) this.views.get(event.output_index)?.delta(event.delta);
    } else if (ENDS.includes(type)) this.end(type, event);
  }

  /**
   * @param {string} type
   * @param {any} event
   */
  end(type, event) {
    this.ended = true;
    const response = event.response ?? {};
    const error = response.error ?? (type === "error" ? (event.error ?? event) : null);
    if (error) return this.fail(error.message);
    const usage = response.usage;
    const seconds = (performance.now() - this.first) / 1000;
    const facts = [];
    if (response.status !== "completed") facts.push(response.incomplete_details?.reason ?? response.status);
    if (usage) {
      const { input_tokens: read, output_tokens: written } = usage;
      facts.push(t("{} tokens in ({} cached), {} out", read, usage.input_tokens_details?.cached_tokens ?? 0, written));
      if (this.first && seconds > 0) facts.push(t("{} tokens/s", (written / seconds).toFixed(0)));
    }
    if (this.first) facts.push(t("first token after {} s", ((this.first - this.began) / 1000).toFixed(2)));
    this.note.textContent = facts.join(" · ");
  }

  /** @param {unknown} error */
  fail(error) {
    this.ended = true;
    this.note.classList.add("error");
    this.note.setAttribute("role", "alert");
    this.note.textContent = visible(error instanceof Error ? error.message : String(error));
  }
}

/**
 * @param {import("./items.js").View | undefined} view
 * @param {any} item
 */
function finish(view, item) {
  view?.done(item);
  if (view) colour(view.node);
}

/**
 * A part of the user's message. A stored file is a text that begins with its name.
 * @param {any} part
 * @param {number} at
 * @param {any[]} all
 */
function partNode(part, at, all) {
  const text = String(part.text ?? `[${part.type}]`);
  if (at === all.length - 1) return el("div", {}, visible(text));
  return el("div", { class: "step" }, `📄 ${visible(nameOf(part))}`);
}
