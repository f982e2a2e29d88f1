// Optional interaction: details of a node, keyboard navigation of map and timeline, zoom.
// All data is read from the page; text is set with textContent only.
(function () {
  "use strict";
  var root = document.documentElement;
  root.classList.add("js");

  function all(selector, from) { return Array.prototype.slice.call((from || document).querySelectorAll(selector)); }
  function byId(id) { return document.getElementById(id); }
  function make(name, text, parent) {
    var element = document.createElement(name);
    if (text) element.textContent = text;
    if (parent) parent.appendChild(element);
    return element;
  }
  function reveal(element) {
    for (var at = element; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  }

  // --- the detail of a node, from its row in the list of nodes and its row among the reasons
  var detail = byId("detail"), body = byId("detail-body"), opener = null, chosen = null;

  function addRow(list, row, skip) {
    var heads = row.closest("table").tHead.rows[0].cells;
    all("th, td", row).forEach(function (cell, index) {
      var text = cell.textContent.trim();
      if (!text || text === "-" || skip.indexOf(heads[index].textContent) >= 0) return;
      make("dt", heads[index].textContent, list);
      make("dd", text, list);
    });
  }
  function addPair(list, title, element) {
    if (!element) return;
    make("dt", title, list);
    make("dd", element.textContent, list);
  }
  function fillDetail(id) {
    var row = byId(id);
    if (!row) return;
    body.textContent = "";
    make("h3", row.querySelector("th").textContent, body);
    var list = make("dl", "", body);
    addRow(list, row, ["node"]);
    var link = row.querySelector('a[href^="#w"]'), stray = link && byId(link.getAttribute("href").slice(1));
    if (stray) {
      var finding = stray.closest(".finding");
      addPair(list, "evidence", finding.querySelector(".evidence"));
      addPair(list, "remedy", finding.querySelector(".remedy") || finding.closest(".reason").querySelector(".remedy"));
      addRow(list, stray, ["node", "operator"]);
    }
    byId("detail-row").setAttribute("href", "#" + id);
  }
  function mark(block) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = block;
    if (chosen) chosen.classList.add("chosen");
  }
  function openDetail(id, from) {
    fillDetail(id);
    detail.classList.add("open");
    opener = from;
    mark(from.classList.contains("b") ? from : null);
  }
  function closeDetail() {
    var inside = detail.contains(document.activeElement);
    detail.classList.remove("open");
    body.textContent = "";
    mark(null);
    if (inside && opener) opener.focus();
  }
  function isOpen() { return detail !== null && detail.classList.contains("open"); }
  if (detail) byId("detail-close").addEventListener("click", closeDetail);
  document.addEventListener("keydown", function (event) { if (event.key === "Escape" && isOpen()) closeDetail(); });

  // --- the map: one stop of the tab order per phase, arrow keys between the nodes
  var phases = {}, strays = [], current = {};
  all(".map td").forEach(function (cell) {
    var blocks = all(".b", cell), name = cell.getAttribute("data-phase");
    var cells = phases[name] = phases[name] || [];
    if (blocks.length) cells.push(blocks);
    blocks.forEach(function (block, index) {
      block.where = { phase: name, row: cells.length - 1, index: index };
      block.setAttribute("aria-label", block.title);
    });
  });
  function makeCurrent(block) {
    // The other phases follow to the same layer, so that Tab leads there.
    all("td[data-phase]", block.closest("tr")).forEach(function (cell) {
      var blocks = all(".b", cell);
      if (blocks.length) makeStop(cell.contains(block) ? block : blocks[Math.min(block.where.index, blocks.length - 1)]);
    });
  }
  function makeStop(block) {
    var before = current[block.where.phase];
    if (before) {
      before.tabIndex = -1;
      before.parentElement.setAttribute("aria-hidden", "true");
    }
    // Only the strip that has the focus is there for a screen reader: the sums in each cell say the rest.
    block.parentElement.removeAttribute("aria-hidden");
    block.tabIndex = 0;
    current[block.where.phase] = block;
  }
  function go(block) {
    makeCurrent(block);
    block.focus();
    if (isOpen()) openDetail(block.getAttribute("href").slice(1), block);
  }
  function neighbour(block, key) {
    var at = block.where, cells = phases[at.phase], row = cells[at.row];
    if (key === "ArrowRight") return row[at.index + 1] || (cells[at.row + 1] || [])[0];
    if (key === "ArrowLeft") return row[at.index - 1] || (cells[at.row - 1] || []).slice(-1)[0];
    if (key === "Home") return row[0];
    if (key === "End") return row[row.length - 1];
    var other = key === "ArrowDown" ? cells[at.row + 1] : key === "ArrowUp" ? cells[at.row - 1] : null;
    return other && other[Math.min(at.index, other.length - 1)];
  }
  Object.keys(phases).forEach(function (name) { if (phases[name].length) makeStop(phases[name][0][0]); });
  all(".map").forEach(function (map) {
    map.addEventListener("click", function (event) {
      var block = event.target.closest(".b");
      if (!block) return;
      event.preventDefault();
      makeCurrent(block);
      block.focus();
      openDetail(block.getAttribute("href").slice(1), block);
    });
    map.addEventListener("keydown", function (event) {
      var block = event.target.closest(".b");
      var next = block && !event.ctrlKey && !event.metaKey && !event.altKey && neighbour(block, event.key);
      if (!next) return;
      event.preventDefault();
      go(next);
    });
  });
  var wantedStyle = "e0", nextStray = byId("next-stray");
  if (nextStray) {
    Object.keys(phases).forEach(function (name) {
      phases[name].forEach(function (row) {
        row.forEach(function (block) { if (!block.classList.contains(wantedStyle)) strays.push(block); });
      });
    });
    var strayAt = -1;
    nextStray.addEventListener("click", function () {
      strayAt = (strayAt + 1) % strays.length;
      var block = strays[strayAt];
      makeCurrent(block);
      // Not to the middle: on a telephone the detail covers the lower half.
      window.scrollTo({ top: block.getBoundingClientRect().top + window.scrollY - window.innerHeight / 4 });
      openDetail(block.getAttribute("href").slice(1), nextStray);
      mark(block);
    });
  }

  // --- the timeline: nodes are read back from the boxes
  function positions(text) {
    var found = [];
    text.split(",").forEach(function (part) {
      var ends = part.split("-"), last = +(ends[1] || ends[0]);
      for (var position = +ends[0]; position <= last; position++) found.push(position);
    });
    return found;
  }
  function events(run) {
    if (run.nodes) return run.nodes;
    run.nodes = [];
    all("[data-p]", run).forEach(function (element) {
      var places = positions(element.getAttribute("data-p")), box = /M(\d+) 0h(\d+)/g, match;
      var path = element.getAttribute("d") || element.getAttribute("data-d");
      var lane = all(".lane", run).filter(function (each) {
        return each.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING;
      }).pop();
      for (var index = 0; (match = box.exec(path)); index++) {
        run.nodes.push({ id: run.getAttribute("data-group") + places[index], start: +match[1], host: +match[2],
          top: +lane.getAttribute("y") });
      }
    });
    run.nodes.sort(function (a, b) { return a.start - b.start; });
    return run.nodes;
  }
  function describe(node) {
    var row = byId(node.id), cells = row ? row.cells : [];
    var name = row ? cells[1].textContent + " (" + cells[2].textContent + ") on " + cells[3].textContent : node.id;
    return name + ": starts at " + (node.start / 1000).toFixed(2) + " ms, takes " + (node.host / 1000).toFixed(3) + " ms";
  }
  function pick(run, view, index) {
    var nodes = events(run), node = nodes[index], span = +run.getAttribute("data-span"), svg = view.firstElementChild;
    if (!node) return;
    run.at = index;
    var cursor = run.querySelector(".cursor");
    if (!cursor) {
      cursor = document.createElementNS(svg.namespaceURI, "rect");
      cursor.setAttribute("class", "cursor");
      svg.appendChild(cursor);
    }
    cursor.setAttribute("x", 100 * node.start / span + "%");
    cursor.setAttribute("width", Math.max(100 * node.host / span, 0.2) + "%");
    cursor.setAttribute("y", node.top);
    cursor.setAttribute("height", 26);
    run.querySelector(".pick").textContent = describe(node);
    view.setAttribute("aria-valuenow", index + 1);
    view.setAttribute("aria-valuetext", describe(node));
  }
  function keepInView(run, view) {
    var node = events(run)[run.at], span = +run.getAttribute("data-span");
    var left = node.start / span * view.scrollWidth, right = left + node.host / span * view.scrollWidth;
    if (left < view.scrollLeft || right > view.scrollLeft + view.clientWidth) view.scrollLeft = left - view.clientWidth / 3;
  }
  function nearest(run, view, event) {
    var frame = view.firstElementChild.getBoundingClientRect(), span = +run.getAttribute("data-span");
    var time = (event.clientX - frame.left) / frame.width * span, top = event.clientY - frame.top;
    var best = -1, distance = Infinity;
    events(run).forEach(function (node, index) {
      if (top < node.top || top > node.top + 26) return;
      var away = time < node.start ? node.start - time : Math.max(0, time - node.start - node.host);
      if (away < distance) { best = index; distance = away; }
    });
    return distance <= span * 8 / frame.width ? best : -1;
  }
  all(".run").forEach(function (run) {
    var view = run.querySelector(".view"), zoom = 1;
    // A slider: the arrow keys choose the node, and its text is read out.
    view.setAttribute("role", "slider");
    view.setAttribute("aria-valuemin", "1");
    view.setAttribute("aria-valuemax", String(positionsOf(run)));
    view.setAttribute("aria-valuenow", "1");
    view.setAttribute("aria-valuetext", "no node chosen");
    function choose(index, open) {
      pick(run, view, Math.max(0, Math.min(index, events(run).length - 1)));
      keepInView(run, view);
      if (open || isOpen()) openDetail(events(run)[run.at].id, view);
    }
    view.addEventListener("keydown", function (event) {
      var at = run.at === undefined ? -1 : run.at, last = events(run).length - 1;
      var steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, PageDown: at + 10,
        PageUp: at - 10, Home: 0, End: last };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in steps) choose(steps[event.key], false);
      else if (event.key === "Enter" && at >= 0) choose(at, true);
      else if (event.key === "+" || event.key === "-") setZoom(event.key === "+" ? 2 : 0.5);
      else return;
      event.preventDefault();
    });
    view.addEventListener("mousemove", function (event) {
      var index = nearest(run, view, event);
      if (index >= 0) pick(run, view, index);
    });
    view.addEventListener("click", function (event) {
      var index = nearest(run, view, event);
      if (index >= 0) { pick(run, view, index); openDetail(events(run)[index].id, view); }
    });
    function setZoom(factor) {
      var middle = (view.scrollLeft + view.clientWidth / 2) / view.scrollWidth;
      zoom = factor ? Math.max(1, Math.min(zoom * factor, 64)) : 1;
      view.firstElementChild.style.width = zoom * 100 + "%";
      drawTicks(view.firstElementChild, +run.getAttribute("data-span"), 4 * zoom);
      view.scrollLeft = middle * view.scrollWidth - view.clientWidth / 2;
      if (run.at !== undefined) keepInView(run, view);
    }
    all("[data-zoom]", run).forEach(function (button) {
      button.addEventListener("click", function () { setZoom(+button.getAttribute("data-zoom")); });
    });
  });
  function drawTicks(svg, span, count) {
    var old = all("text", svg), first = old[0];
    old.slice(1).forEach(function (each) { each.remove(); });
    for (var number = 1; number <= count; number++) {
      var tick = first.cloneNode(), time = span * number / count / 1000;
      tick.setAttribute("x", 100 * number / count + "%");
      tick.setAttribute("text-anchor", number === count ? "end" : "middle");
      tick.textContent = (time < 10 ? time.toFixed(2) : time < 100 ? time.toFixed(1) : Math.round(time)) + " ms";
      svg.appendChild(tick);
    }
  }
  function positionsOf(run) {
    return all("[data-p]", run).reduce(function (sum, each) { return sum + positions(each.getAttribute("data-p")).length; }, 0);
  }

  // --- the rest: a link opens what its target is folded into; paper shows everything; only what scrolls is a tab stop
  function followHash() {
    var target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    reveal(target);
    target.scrollIntoView();
    stops();
  }
  function stops() {
    // All sizes are read before anything is written, so that the page is laid out once; what is folded away is not asked,
    // because that would lay it out.
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
