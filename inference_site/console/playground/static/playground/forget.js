// On the page after logging out: this browser keeps none of the playground's conversations.
indexedDB.deleteDatabase("playground");
for (const name of ["playground:shown", "playground:left"]) sessionStorage.removeItem(name);
