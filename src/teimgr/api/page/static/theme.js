// Runs before the first paint, so that a chosen theme or density does not flash.
try {
  if (localStorage.getItem("teimgr-density") === "dense") document.documentElement.dataset.density = "dense";
  const theme = localStorage.getItem("teimgr-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is off: the defaults */ }
