// Swagger UI's own dark colors wherever the console is dark: as chosen, else as the machine is.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => root.classList.toggle("dark-mode", root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
dark.addEventListener("change", paint);
paint();
