// What the scripts of JavaScript clients share: where the site is, and how a step is reported.
export const { SITE_URL: url, SITE_KEY: key, SITE_MODEL: model, SITE_SMALL_MODEL: small } = process.env;
export const weather = 'Please look.\nCALL get_weather {"city": "Oslo"}';
export const sunny = "sunny in Oslo";
export const person = 'SAY {"name": "Ann", "age": 7}';
export const getWeather = ({ city }) => `sunny in ${city}`;

export async function step(name, work) {
  let error = "";
  try {
    await work();
  } catch (exc) {
    error = `${exc?.name}: ${exc?.message}`.slice(0, 300);
  }
  console.log("STEP " + JSON.stringify({ step: name, error }));
}

export function holds(text, part) {
  if (!text?.includes(part)) throw new Error(`${JSON.stringify(part)} is not in ${JSON.stringify(text)}`);
}
