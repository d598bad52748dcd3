//! The sentences of the documentation, and the words that they begin with.
//!
//! Owns: the words with which a sentence names no subject, and the share of sentences that may begin so. Does not own: any other rule for
//! text, which takes a reader.

/// A sentence that begins so says only later, or in another sentence, who does something.
const VAGUE: &[&str] =
    &["What", "Who", "Whose", "Of", "It", "Its", "One", "That", "Those", "This", "These", "They", "Which"];

/// Sentences for each one that may begin so.
const ONE_IN: usize = 100;

/// The places that a failed check names.
const SHOWN_MAX: usize = 20;

/// The sentences of all sources.
#[derive(Debug, Default)]
pub(crate) struct Prose {
    sentences: usize,
    /// Where each vague one begins, and how.
    vague: Vec<String>,
}

impl Prose {
    /// Adds the documentation in a source file.
    pub(crate) fn read(&mut self, shown: &str, text: &str) {
        let mut paragraph = Paragraph::default();
        let mut is_code = false;
        for (index, line) in text.lines().enumerate() {
            let words = documentation(line);
            is_code = is_code && words.is_some();
            match words.map(str::trim) {
                Some(fence) if fence.starts_with("```") => {
                    is_code = !is_code;
                    self.end(shown, &mut paragraph);
                }
                Some(words) if !is_code && !words.is_empty() && !words.starts_with(['#', '|']) => {
                    // An entry of a list is a paragraph of its own.
                    if let Some(entry) = words.strip_prefix("- ") {
                        self.end(shown, &mut paragraph);
                        paragraph.add(index + 1, entry);
                    } else {
                        paragraph.add(index + 1, words);
                    }
                }
                Some(_) | None => self.end(shown, &mut paragraph),
            }
        }
        self.end(shown, &mut paragraph);
    }

    fn end(&mut self, shown: &str, paragraph: &mut Paragraph) {
        for (line, sentence) in std::mem::take(paragraph).sentences() {
            self.sentences += 1;
            if is_vague(&sentence) {
                self.vague.push(format!("{shown}:{line}: {sentence}"));
            }
        }
    }

    /// Returns a line that says how many there are, for people.
    pub(crate) fn text(&self) -> String {
        format!("doc sentences that name no subject first: {} of {}", self.vague.len(), self.sentences)
    }

    /// Returns a line for each problem.
    pub(crate) fn problems(&self) -> Vec<String> {
        if self.vague.len() * ONE_IN <= self.sentences {
            return vec![];
        }
        let head = format!("{}, more than one in {ONE_IN}: name who does it first", self.text());
        std::iter::once(head).chain(self.vague.iter().take(SHOWN_MAX).cloned()).collect()
    }
}

/// Lines of documentation without a blank one between them.
#[derive(Debug, Default)]
struct Paragraph(Vec<(usize, String)>);

impl Paragraph {
    fn add(&mut self, line: usize, words: &str) {
        self.0.extend(words.split_whitespace().map(|word| (line, word.to_owned())));
    }

    /// Each sentence, with the line where it begins.
    fn sentences(self) -> Vec<(usize, String)> {
        let mut found: Vec<(usize, String)> = vec![];
        let mut begins = true;
        for (line, word) in self.0 {
            let ends = word.ends_with(['.', '?', '!']);
            match found.last_mut() {
                Some((_, sentence)) if !begins => {
                    sentence.push(' ');
                    sentence.push_str(&word);
                }
                _ => found.push((line, word)),
            }
            begins = ends;
        }
        found
    }
}

/// The text of a line of documentation.
fn documentation(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).filter(|text| !text.starts_with('/'))
}

/// A question may begin so: the benches open with one.
fn is_vague(sentence: &str) -> bool {
    let first = sentence.split(|letter: char| !letter.is_alphanumeric() && letter != '\'').next();
    !sentence.ends_with('?') && first.is_some_and(|word| VAGUE.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Prose {
        let mut prose = Prose::default();
        prose.read("a.rs", text);
        prose
    }

    #[test]
    fn a_sentence_is_found_wherever_it_begins() {
        let prose = read(
            "//! Owns a. It is\n//! long.\n\n/// Returns b.\n///\n/// What is\n/// not there.\nfn b() {}\n",
        );
        assert_eq!(prose.sentences, 4);
        assert_eq!(prose.vague, ["a.rs:1: It is long.", "a.rs:6: What is not there."]);
    }

    #[test]
    fn code_questions_and_comments_do_not_count() {
        let prose = read(
            "//! What does it cost?\n\n/// Of:\n/// ```\n/// It.\n/// ```\n// It is.\n//// It is.\nlet it = 1;\n",
        );
        assert_eq!((prose.sentences, prose.vague.len()), (2, 1));
        assert!(read("/// Italic, and That's it.\n").vague.is_empty());
    }

    #[test]
    fn one_in_a_hundred_passes_and_one_more_does_not() {
        let good = "/// Returns a.\n\n".repeat(ONE_IN - 1);
        assert!(read(&format!("{good}/// It is.\n")).problems().is_empty());
        let problems = read(&format!("{good}/// It is.\n\n/// It was.\n")).problems();
        assert!(problems.len() == 3 && problems[0].contains("2 of 101"), "{problems:?}");
    }
}
