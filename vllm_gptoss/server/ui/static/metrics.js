// Reads Prometheus text.

/**
 * Sums of a text's samples by name.
 * @param {string} text
 * @returns {Map<string, number>}
 */
export function sums(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    if (match) found.set(match[1], (found.get(match[1]) ?? 0) + Number(match[2]));
  }
  return found;
}
