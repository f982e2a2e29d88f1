// Links open the folds around their target, and a button goes to the next fallback. The page is complete without the script.
(function () {
  "use strict";

  function all(selector) { return Array.prototype.slice.call(document.querySelectorAll(selector)); }
  function byId(id) { return document.getElementById(id); }
  function reveal(element) {
    for (var at = element; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  }

  // --- the map: the next node that is not on the preferred provider, whose class is e0
  var button = byId("next-fallback"), place = -1, seen = {};
  var fallbacks = all(".map .b:not(.e0)").filter(function (block) {
    var row = block.getAttribute("href"), first = !seen[row];
    seen[row] = true;
    return first;
  });
  if (button) button.hidden = !fallbacks.length;
  if (button) button.addEventListener("click", function () {
    if (place >= 0) fallbacks[place].classList.remove("chosen");
    place = (place + 1) % fallbacks.length;
    fallbacks[place].classList.add("chosen");
    location.hash = fallbacks[place].getAttribute("href");
  });

  // --- print shows all folds; only areas that scroll are tab stops
  function followHash() {
    var target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    reveal(target);
    target.scrollIntoView();
    stops();
  }
  function stops() {
    // All sizes are read before any change, so that the page is laid out once. Closed folds are skipped: reading their
    // sizes would lay them out.
    var areas = all(".scroll").filter(function (area) { return !area.closest("details:not([open])"); });
    var scrolls = areas.map(function (area) {
      return area.scrollHeight > area.clientHeight + 1 || area.scrollWidth > area.clientWidth + 1;
    });
    areas.forEach(function (area, index) {
      if (scrolls[index]) area.tabIndex = 0; else area.removeAttribute("tabindex");
    });
  }
  var folded = [];
  window.addEventListener("beforeprint", function () {
    folded = all("details:not([open])");
    folded.forEach(function (each) { each.open = true; });
  });
  window.addEventListener("afterprint", function () { folded.forEach(function (each) { each.open = false; }); });
  window.addEventListener("hashchange", followHash);
  window.addEventListener("resize", stops);
  document.addEventListener("toggle", stops, true);
  followHash();
  setTimeout(stops, 0);
})();
