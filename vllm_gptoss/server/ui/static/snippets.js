// A request as a curl command and as a Python program.

/**
 * JSON whose characters that reorder text are escaped.
 * @param {unknown} value
 */
const json = (value) =>
  JSON.stringify(value, null, 2).replace(/[\u202a-\u202e\u2066-\u2069]/g, (c) => `\\u${c.charCodeAt(0).toString(16)}`);

/**
 * @param {string} url of the API, ending in /v1
 * @param {object} body of a request to /responses
 */
export function curl(url, body) {
  const data = json(body).replaceAll("'", "'\\''");
  const headers = `-H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json"`;
  return `curl ${url}/responses ${headers} -d '${data}'\n`;
}

/**
 * @param {string} url
 * @param {Record<string, unknown>} body
 */
export function python(url, body) {
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value)},\n`);
  return [
    "import os\n",
    "from openai import OpenAI\n",
    `client = OpenAI(base_url=${json(url)}, api_key=os.environ.get("OPENAI_API_KEY", "none"))`,
    `response = client.responses.create(\n${fields.join("")})`,
    "print(response.output_text)\n",
  ].join("\n");
}

/**
 * @param {any} value
 * @returns {string} as a Python literal
 */
function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${json(k)}: ${literal(v)}`).join(", ")}}`;
  return json(value);
}
