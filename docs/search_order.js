// Which hits of the search come first: headings that are what was asked, then pages with more of the asked words in
// their title or in their headings; guides before pages that name everything.
const NAMES_EVERYTHING =
  /^(CHANGELOG|CONTRIBUTING|LEDGER|docs\/(architecture|decisions|measurements|commands|coverage|performance|reference|paper))$/;

const share = (words, held) => words.filter((word) => held.has(word)).length / Math.max(words.length, 1);

var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score, , kind]) => {
    if (kind === SearchResultKind.object) return score;
    if (kind === SearchResultKind.title) return score + 30;
    const stemmer = new Stemmer();
    const stems = (text) =>
      splitQuery(text.toLowerCase())
        .filter((word) => !stopwords.has(word))
        .map((word) => stemmer.stemWord(word));
    const number = Search._index.docnames.indexOf(page);
    const words = stems(new URLSearchParams(window.location.search).get("q"));
    const titled = new Set(stems(Search._index.titles[number]));
    const headed = new Set(words.filter((word) => [Search._index.titleterms[word]].flat().includes(number)));
    const behind = NAMES_EVERYTHING.test(page) ? 15 : 0;
    return score + 20 * share(words, titled) + 10 * share(words, headed) - behind;
  },
};
