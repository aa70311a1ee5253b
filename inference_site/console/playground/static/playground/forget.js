// Runs on the page after logging out: deletes the playground's conversations from this browser.
indexedDB.deleteDatabase("playground");
for (const name of ["playground:shown", "playground:left"]) sessionStorage.removeItem(name);
