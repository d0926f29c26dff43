//! `cargo xtask licenses`: every dependency must be usable under a licence of [`ALLOWED`].
//!
//! A small evaluator of SPDX expressions over `cargo metadata`, so that the check needs no tool that has to be
//! installed first. The same list is in deny.toml for those who have cargo-deny; a test keeps the two equal.

use std::path::Path;

use anyhow::{Result, bail};

use crate::cargo::Metadata;

/// Licences that a dependency may have: permissive, and compatible with MIT OR Apache-2.0.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

pub(crate) fn run(root: &Path) -> Result<()> {
    let metadata = Metadata::read(root)?;
    let mut faults = Vec::new();
    for package in &metadata.packages {
        let verdict = match &package.license {
            None => Err("names no licence".to_owned()),
            Some(expression) => match allowed(expression) {
                Ok(true) => Ok(()),
                Ok(false) => Err(format!("is under {expression}")),
                Err(why) => Err(format!("has the licence expression {expression:?}: {why}")),
            },
        };
        if let Err(why) = verdict {
            faults.push(format!("{} {} {why}", package.name, package.version));
        }
    }
    if !faults.is_empty() {
        bail!(
            "licences: {} fault(s)\n  {}",
            faults.len(),
            faults.join("\n  ")
        );
    }
    println!(
        "licences: {} packages, all permissive",
        metadata.packages.len()
    );
    Ok(())
}

/// Whether the licence expression can be satisfied with [`ALLOWED`] licences alone.
///
/// Grammar: `or := and (OR and)*`, `and := atom (AND atom)*`, `atom := '(' or ')' | ID [WITH ID]`. The slash of
/// old manifests (`MIT/Apache-2.0`) means OR.
fn allowed(expression: &str) -> Result<bool, String> {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let verdict = or(&tokens, &mut at)?;
    match tokens.get(at) {
        None => Ok(verdict),
        Some(token) => Err(format!("unexpected {token:?}")),
    }
}

fn or(tokens: &[&str], at: &mut usize) -> Result<bool, String> {
    let mut verdict = and(tokens, at)?;
    while tokens.get(*at) == Some(&"OR") {
        *at += 1;
        verdict |= and(tokens, at)?;
    }
    Ok(verdict)
}

fn and(tokens: &[&str], at: &mut usize) -> Result<bool, String> {
    let mut verdict = atom(tokens, at)?;
    while tokens.get(*at) == Some(&"AND") {
        *at += 1;
        verdict &= atom(tokens, at)?;
    }
    Ok(verdict)
}

fn atom(tokens: &[&str], at: &mut usize) -> Result<bool, String> {
    let token = *tokens.get(*at).ok_or("it ends too early")?;
    *at += 1;
    match token {
        "(" => {
            let verdict = or(tokens, at)?;
            if tokens.get(*at) != Some(&")") {
                return Err("a parenthesis is not closed".into());
            }
            *at += 1;
            Ok(verdict)
        }
        ")" | "OR" | "AND" | "WITH" => Err(format!("unexpected {token:?}")),
        licence => {
            let mut name = licence.to_owned();
            if tokens.get(*at) == Some(&"WITH") {
                let exception = tokens.get(*at + 1).ok_or("WITH what?")?;
                name = format!("{licence} WITH {exception}");
                *at += 2;
            }
            Ok(ALLOWED.contains(&name.as_str()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        for good in [
            "MIT",
            "MIT OR Apache-2.0",
            "MIT/Apache-2.0",
            "GPL-3.0 OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
        ] {
            assert_eq!(allowed(good), Ok(true), "{good}");
        }
        for bad in [
            "GPL-3.0",
            "MIT AND GPL-2.0",
            "MPL-2.0",
            "Apache-2.0 WITH Other-exception",
            "(GPL-2.0 OR MPL-2.0) OR AGPL-3.0",
        ] {
            assert_eq!(allowed(bad), Ok(false), "{bad}");
        }
        for nonsense in ["", "(MIT", "MIT)", "OR MIT", "MIT WITH", "MIT MIT"] {
            assert!(allowed(nonsense).is_err(), "{nonsense}");
        }
    }

    #[test]
    fn deny_toml_has_the_same_list() {
        let text = include_str!("../../deny.toml");
        let start = text.find("allow = [").expect("deny.toml has an allow list");
        let list = &text[start..start + text[start..].find(']').expect("the list ends")];
        let named: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
        assert_eq!(named, ALLOWED);
    }
}
