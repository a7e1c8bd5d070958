// Reads Prometheus text.

/** @typedef {{name: string, labels: string, value: number}} Sample */

/**
 * @param {string} text
 * @returns {Sample[]}
 */
export function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (match) found.push({ name: match[1], labels: match[2] ?? "", value: Number(match[3]) });
  }
  return found;
}

/**
 * The sum of a metric's samples.
 * @param {Sample[]} all
 * @param {string} name
 * @param {string} [label] that the samples have, as `le="0.1"`
 */
export const sum = (all, name, label = "") =>
  all.reduce((total, each) => total + (each.name === name && each.labels.includes(label) ? each.value : 0), 0);

/**
 * The sums of a metric's samples by one label, largest first.
 * @param {Sample[]} all
 * @param {string} name
 * @param {string} label
 * @returns {[string, number][]}
 */
export function by(all, name, label) {
  const found = new Map();
  for (const each of all.filter((sample) => sample.name === name)) {
    const key = new RegExp(`(?:^|,)${label}="([^"]*)"`).exec(each.labels)?.[1] ?? "";
    found.set(key, (found.get(key) ?? 0) + each.value);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}
