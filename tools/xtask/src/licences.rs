//! Whether everything that is linked may be shipped under Apache-2.0.
//!
//! Owns: the list of accepted licences and the reading of SPDX expressions. A licence outside the list is
//! refused, so a person decides about each new one here.

use crate::workspace::Workspace;

/// Permissive licences. GPL, AGPL and LGPL are not here, and must not be: binaries are linked statically.
const ACCEPTED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "OpenSSL",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "Zlib",
    // Copyleft of the single file only; linking it asks nothing of our own files.
    "MPL-2.0",
];

/// Returns the problems, one line for each package; empty when all may be linked.
pub(crate) fn problems(workspace: &Workspace) -> Vec<String> {
    workspace
        .packages
        .iter()
        .filter_map(|package| {
            let name = format!("{} {}", package.name, package.version);
            match &package.licence {
                None => Some(format!(
                    "{name} names no licence: read its files and leave it out, or judge it here"
                )),
                Some(licence) if !accepted(licence) => {
                    Some(format!("{name} is under `{licence}`, which nobody has accepted for linking"))
                }
                Some(_) => None,
            }
        })
        .collect()
}

/// True when an SPDX expression can be met with accepted licences alone.
fn accepted(expression: &str) -> bool {
    // Old manifests write `MIT/Apache-2.0` for a choice.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    choice(&mut rest) == Some(true) && rest.is_empty()
}

/// `term OR term …`; `None` when the text is no expression.
fn choice(rest: &mut &[&str]) -> Option<bool> {
    let mut met = both(rest)?;
    while rest.first() == Some(&"OR") {
        *rest = &rest[1..];
        met |= both(rest)?;
    }
    Some(met)
}

/// `factor AND factor …`
fn both(rest: &mut &[&str]) -> Option<bool> {
    let mut met = single(rest)?;
    while rest.first() == Some(&"AND") {
        *rest = &rest[1..];
        met &= single(rest)?;
    }
    Some(met)
}

/// Reads a licence, with its exception, or an expression in parentheses.
fn single(rest: &mut &[&str]) -> Option<bool> {
    let (first, tail) = rest.split_first()?;
    *rest = tail;
    if *first == "(" {
        let met = choice(rest)?;
        let (close, tail) = rest.split_first()?;
        *rest = tail;
        return (*close == ")").then_some(met);
    }
    if let ["WITH", exception, tail @ ..] = *rest {
        *rest = tail;
        return Some(ACCEPTED.contains(&format!("{first} WITH {exception}").as_str()));
    }
    Some(ACCEPTED.contains(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_accepted_branch_of_a_choice_is_enough() {
        for expression in ["MIT", "MIT OR GPL-3.0-only", "MIT/Apache-2.0", "(MIT OR GPL-2.0) AND Unicode-3.0"]
        {
            assert!(accepted(expression), "{expression}");
        }
        assert!(accepted("Apache-2.0 WITH LLVM-exception OR MIT"));
    }

    #[test]
    fn copyleft_that_cannot_be_avoided_is_refused() {
        for expression in
            ["GPL-3.0-only", "MIT AND AGPL-3.0-only", "GPL-2.0 WITH Classpath-exception-2.0", "(MIT", ""]
        {
            assert!(!accepted(expression), "{expression}");
        }
    }

    #[test]
    fn no_gnu_licence_is_on_the_list() {
        assert!(ACCEPTED.iter().all(|name| !name.contains("GPL")));
    }
}
