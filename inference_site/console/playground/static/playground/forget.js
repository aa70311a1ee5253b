// On the page after logging out: this browser keeps none of the playground's conversations.
indexedDB.deleteDatabase("playground");
sessionStorage.removeItem("playground:shown");
