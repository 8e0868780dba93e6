// The grammar of frontend/core/numbers.py. Arguments are whole numbers: `fixed` of the last decimal, `money` of millionths.
"use strict";
const numbers = (() => {
  const isGerman = document.documentElement.lang === "de";
  const [group, point] = isGerman ? [".", ","] : [",", "."];
  const UNITS = [[10n ** 12n, "T"], [10n ** 9n, "B"], [10n ** 6n, "M"], [1000n, "K"]];
  const halfUp = (part, whole) => (2n * part + whole) / (2n * whole);
  const power = (places) => 10n ** BigInt(places);
  const exact = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, group);
  const fixed = (scaled, places) => {
    const digits = String(scaled).padStart(places + 1, "0");
    return exact(digits.slice(0, digits.length - places)) + (places ? point + digits.slice(-places) : "");
  };
  const count = (value) => {
    const number = BigInt(value);
    if (number <= 99999n) return exact(number);
    const [unit, name] = UNITS.find(([unit]) => halfUp(number, unit / 1000n) >= 1000n);
    const places = [2, 1].find((places) => halfUp(number * power(places), unit) < 1000n) || 0;
    return fixed(halfUp(number * power(places), unit), places) + name;
  };
  const share = (part, whole) => {
    const [some, all] = [BigInt(part), BigInt(whole)];
    const hundredths = halfUp(some * 10000n, all);
    if (hundredths < 100n) return some && !hundredths ? `<${fixed(1n, 2)}%` : `${fixed(hundredths, 2)}%`;
    const tenths = halfUp(some * 1000n, all);
    return `${tenths < 10000n ? fixed(tenths, 1) : exact(halfUp(some * 100n, all))}%`;
  };
  const duration = (microseconds) => {
    const milliseconds = halfUp(BigInt(microseconds), 1000n);
    return milliseconds < 1000n ? `${milliseconds} ms` : `${fixed(halfUp(BigInt(microseconds), 10000n), 2)} s`;
  };
  const placed = (text, symbol) => (isGerman ? `${text}\u00a0${symbol.trim()}` : symbol + text);
  const amount = (scaled, scale, places, symbol) => {
    const number = BigInt(scaled);
    const shown = halfUp(number, power(scale - places));
    return number && !shown ? `<${placed(fixed(1n, places), symbol)}` : placed(fixed(shown, places), symbol);
  };
  const money = (millionths, symbol, digits) => {
    const number = BigInt(millionths);
    if (!number || number >= power(6 - digits)) return amount(number, 6, digits, symbol);
    const text = fixed(number, 6);
    const least = digits ? text.length - 6 + digits : text.length - 7;
    return placed(text.slice(0, Math.max(least, text.replace(/0+$/, "").length)), symbol);
  };
  return { UNITS, point, exact, fixed, count, share, duration, amount, money, placed };
})();
