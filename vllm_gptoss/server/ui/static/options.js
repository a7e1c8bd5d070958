// The options below the conversation: effort, tools and instructions. They are kept in this browser.

import { getJson } from "./api.js";
import { t } from "./appearance.js";
import { byId, el, visible } from "./dom.js";

const OPTIONS = "gptoss.options";
const APPROVAL = { always: { read_only: false }, never: { read_only: true } };

/** The fields of a request that the options choose. */
export function chosen() {
  /** @type {Record<string, any>} */
  const fields = { reasoning: { effort: byId("effort").value }, tools: [] };
  if (byId("instructions").value.trim()) fields.instructions = byId("instructions").value;
  for (const box of document.querySelectorAll("#tools input:checked")) {
    fields.tools.push(JSON.parse(/** @type {HTMLInputElement} */ (box).value));
  }
  return fields;
}

/** Shows the server's model, and its tools as check boxes. */
export async function readServer() {
  const server = await getJson("ui/server");
  byId("model").textContent = server.model;
  /** @type {[string, object][]} */
  const tools = [];
  for (const provider of server.tools.filter((/** @type {any} */ each) => !each.unavailable)) {
    for (const { name, kind } of provider.namespaces) {
      if (kind === "python") tools.push(["Python", { type: "code_interpreter", container: { type: "auto" } }]);
      else if (kind === "browser") tools.push(["Web", { type: "web_search" }]);
      else tools.push([name, { type: "mcp", server_label: name, require_approval: APPROVAL }]);
    }
  }
  const saved = JSON.parse(localStorage.getItem(OPTIONS) ?? "{}");
  byId("effort").value = saved.effort ?? "medium";
  byId("instructions").value = saved.instructions ?? "";
  const boxes = tools.map(([label, tool]) => {
    const checked = saved.tools ? saved.tools.includes(label) : label === "Python";
    const box = el("input", { type: "checkbox", name: label, value: JSON.stringify(tool), checked });
    return el("label", {}, box, ` ${visible(t(label))}`);
  });
  byId("tools").replaceChildren(el("legend", {}, t("Tools")), ...boxes);
}

export function saveOptions() {
  const tools = [...document.querySelectorAll("#tools input:checked")].map((box) => box.getAttribute("name"));
  const saved = { effort: byId("effort").value, instructions: byId("instructions").value, tools };
  localStorage.setItem(OPTIONS, JSON.stringify(saved));
}
