// Numbers as people read them. What isn't known (null) is a dash.

export const NONE = "–";

export function bytes(value) {
  if (value == null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${value.toFixed(at && value < 99.5 ? 1 : 0)} ${units[at]}`;
}

export function rate(value) {
  return value ? `${bytes(value)}/s` : NONE;
}

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 99.5) return `${value.toFixed(0)} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function figure(value, digits = 4) {
  if (value == null) return NONE;
  if (Number.isInteger(value)) return count(value);
  return String(Number(value.toPrecision(digits)));
}

export function count(value) {
  return value == null ? NONE : value.toLocaleString("en");
}

export function percent(share) {
  return share == null ? NONE : `${Math.round(100 * share)} %`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}

// The time of day, with the date (in Sweden's order, year first) where that isn't today.
export function moment(time) {
  const found = new Date(time * 1000);
  const today = found.toDateString() === new Date().toDateString();
  return today ? clock(time) : `${found.toLocaleDateString("sv")} ${clock(time)}`;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : /(s|ch)$/.test(word) ? "es" : "s"}`;
}
