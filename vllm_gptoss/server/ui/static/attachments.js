// The files that the next message carries.

import { t } from "./appearance.js";
import { byId, el, visible } from "./dom.js";

const MOST_MB = 16;
const PDF = "application/pdf";
/** @type {any[]} content parts */
let parts = [];

/**
 * @param {any} part
 * @returns {string} the file's name; the server stores a file as a text that begins with it
 */
export const nameOf = (part) => part.filename ?? /^\[file: (.{1,200}?)[\],]/.exec(part.text ?? "")?.[1] ?? "text";

/**
 * Adds files to the next message. The server reads PDF files and UTF-8 text.
 * @param {Iterable<File>} chosen
 */
export async function attach(chosen) {
  for (const file of chosen) {
    if (file.size > MOST_MB << 20) throw new Error(t("{} has more than {} MB.", file.name, MOST_MB));
    const kind = file.type === PDF ? PDF : "text/plain";
    const url = await dataUrl(new Blob([file], { type: kind }));
    parts.push({ type: "input_file", filename: file.name, file_data: url });
  }
  show();
}

/** Returns the content parts of the attached files, and removes the files. */
export function takeFiles() {
  const taken = parts;
  putFiles([]);
  return taken;
}

/** @param {any[]} wanted content parts */
export function putFiles(wanted) {
  parts = wanted;
  show();
}

/**
 * @param {Blob} blob
 * @returns {Promise<string>}
 */
function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

function show() {
  byId("files").replaceChildren(
    ...parts.map((part) => {
      const name = visible(nameOf(part));
      const remove = () => putFiles(parts.filter((each) => each !== part));
      return el("button", { type: "button", class: "small", "aria-label": t("Remove {}", name), onclick: remove }, `${name} ✕`);
    }),
  );
}
