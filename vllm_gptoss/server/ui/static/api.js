// Requests to this server's API, with the API key of this tab.

import { t } from "./appearance.js";

export const BASE = new URL("../v1/", document.baseURI);
const KEY = "gptoss.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  /** @param {string} value */
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The server's error for a request. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * @param {string} method
 * @param {string} path below /v1/
 * @param {object} [body]
 * @param {AbortSignal} [signal]
 * @returns {Promise<Response>}
 */
export async function request(method, path, body, signal) {
  /** @type {Record<string, string>} */
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(new URL(path, BASE), {
    method,
    headers,
    signal,
    body: body && JSON.stringify(body),
    credentials: "omit",
  });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => ({}))).error;
  const wrongKey = answer.status === 401 ? ` ${t("The API key is missing or wrong.")}` : "";
  throw new ApiError(answer.status, `${error?.message ?? error ?? "Error"} (HTTP ${answer.status}).${wrongKey}`);
}

/**
 * @param {string} path
 * @returns {Promise<any>}
 */
export const getJson = async (path) => (await request("GET", path)).json();

/**
 * The events of a server-sent stream.
 * @param {Response} answer
 * @returns {AsyncGenerator<any>}
 */
export async function* events(answer) {
  const reader = /** @type {ReadableStream} */ (answer.body).pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop() ?? "";
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

/**
 * Saves a file of the python tool. The request has the API key, which a plain link would not send.
 * @param {{container_id: string, file_id: string, filename: string}} file
 */
export async function download(file) {
  const path = `containers/${encodeURIComponent(file.container_id)}/files/${encodeURIComponent(file.file_id)}/content`;
  const url = URL.createObjectURL(new Blob([await (await request("GET", path)).arrayBuffer()]));
  const anchor = document.createElement("a");
  anchor.href = url;
  anchor.download = file.filename;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
