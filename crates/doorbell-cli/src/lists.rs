//! Sizes, counts and durations as people type them: `8,64K,1M`, `8:1M`, `1,2,4`, `2.5`.
//! Every refusal names the piece that was wrong and shows a form that works.
//! K, M and G are powers of 1024, as in perftest and UCX.

use std::time::Duration;

/// The largest message: one mlx5 data segment carries less than 2^31 bytes, and the
/// benchmark's kernels post one WQE a message.
pub(crate) const MAX_SIZE: u64 = 1 << 30;

/// A comma-separated list that was parsed and is never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List(pub(crate) Vec<u64>);

/// One number with an optional K, M or G.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let (digits, shift) = match trimmed.char_indices().last() {
        Some((at, 'k' | 'K')) => (&trimmed[..at], 10),
        Some((at, 'm' | 'M')) => (&trimmed[..at], 20),
        Some((at, 'g' | 'G')) => (&trimmed[..at], 30),
        _ => (trimmed, 0),
    };
    let wrong =
        || format!("`{text}` is not a size: give bytes, or use K, M, G (1024-based), as in 64K");
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("`{text}` does not fit 64 bits"))
}

/// The same, and not nothing.
pub(crate) fn some_bytes(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        0 => Err("nothing is too little: give bytes, or use K, M, G, as in 64M".to_owned()),
        n => Ok(n),
    }
}

/// `--size`: a list of sizes and doubling ranges, `8,64K` or `8:1M`, each from 1 byte to 1 GiB.
pub(crate) fn sizes(text: &str) -> Result<List, String> {
    list(text, bytes, 1, MAX_SIZE, "size", "8,64K or 8:1M")
}

/// `--blocks`: a list of counts and doubling ranges, `1,2,64` or `1:128`.
pub(crate) fn blocks(text: &str) -> Result<List, String> {
    list(text, count, 1, 65_535, "block count", "1,16,64 or 1:128")
}

fn count(text: &str) -> Result<u64, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("`{text}` is not a number"))
}

fn list(
    text: &str,
    one: fn(&str) -> Result<u64, String>,
    min: u64,
    max: u64,
    what: &str,
    example: &str,
) -> Result<List, String> {
    let check = |value: u64, piece: &str| {
        if (min..=max).contains(&value) {
            Ok(value)
        } else {
            Err(format!("{what} `{piece}` is outside {min} to {max}"))
        }
    };
    let mut out = Vec::new();
    for piece in text.split(',') {
        if piece.trim().is_empty() {
            return Err(format!(
                "an empty {what} in `{text}`: write a list as in {example}"
            ));
        }
        match piece.split_once(':') {
            None => out.push(check(one(piece)?, piece)?),
            Some((from, to)) => {
                let (from, to) = (check(one(from)?, from)?, check(one(to)?, to)?);
                if from > to {
                    return Err(format!(
                        "the range `{piece}` runs backwards: a range doubles from low to high, as in {example}"
                    ));
                }
                let mut value = from;
                while value < to {
                    out.push(value);
                    value *= 2;
                }
                out.push(to);
            }
        }
    }
    Ok(List(out))
}

/// Seconds with a fraction, more than 0 and at most a day.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    match text.trim().parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 86_400.0 => Ok(Duration::from_secs_f64(s)),
        _ => Err(format!(
            "`{text}` is not a time: give seconds above 0 and up to 86400, as in 2 or 0.5"
        )),
    }
}

/// `--depth`: a power of two from 2 to 32768, what an mlx5 send queue of 16-bit indexes takes.
pub(crate) fn depth(text: &str) -> Result<u32, String> {
    let value = bytes(text)?;
    if (2..=32_768).contains(&value) && value.is_power_of_two() {
        return Ok(value as u32);
    }
    let near = value
        .clamp(2, 32_768)
        .checked_next_power_of_two()
        .unwrap_or(32_768);
    Err(format!(
        "a queue depth is a power of two from 2 to 32768 (WQE indexes have 16 bits); the nearest is {near}"
    ))
}

/// `--pin`: CPUs for this process and for the second one; none: leave both to the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pins(pub(crate) Option<(usize, Option<usize>)>);

/// `none`, `3` or `2,3`.
pub(crate) fn pins(text: &str) -> Result<Pins, String> {
    if text == "none" {
        return Ok(Pins(None));
    }
    let cpu = |piece: &str| {
        piece
            .trim()
            .parse::<usize>()
            .map_err(|_| format!("`{piece}` is not a CPU number: give one, two as in 2,3, or none"))
    };
    match text.split_once(',') {
        None => Ok(Pins(Some((cpu(text)?, None)))),
        Some((a, b)) => Ok(Pins(Some((cpu(a)?, Some(cpu(b)?))))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_lists_and_ranges() {
        assert_eq!(sizes("8").unwrap().0, [8]);
        assert_eq!(sizes("8,64K,1m").unwrap().0, [8, 65_536, 1 << 20]);
        assert_eq!(sizes("8:64").unwrap().0, [8, 16, 32, 64]);
        assert_eq!(sizes("8:40").unwrap().0, [8, 16, 32, 40]);
        assert_eq!(sizes("1,8:16,1G").unwrap().0, [1, 8, 16, 1 << 30]);
    }

    #[test]
    fn refusals_name_the_piece_and_a_remedy() {
        for (text, part) in [
            ("4Q", "`4Q`"),
            ("8,,9", "empty size"),
            ("", "empty size"),
            ("-1", "`-1`"),
            ("0", "outside 1 to"),
            ("2G", "outside 1 to"),
            ("64:8", "backwards"),
            ("99999999999999999999", "not a size"),
            ("9999999999999G", "64 bits"),
            ("K", "`K`"),
            ("8é", "`8é`"),
        ] {
            let error = sizes(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn depths_are_powers_of_two() {
        assert_eq!(depth("1024").unwrap(), 1024);
        assert_eq!(depth("1K").unwrap(), 1024);
        assert!(depth("1000").unwrap_err().contains("nearest is 1024"));
        assert!(depth("65536").unwrap_err().contains("nearest is 32768"));
        assert!(depth("0").unwrap_err().contains("nearest is 2"));
    }

    #[test]
    fn cpus() {
        assert_eq!(pins("none").unwrap(), Pins(None));
        assert_eq!(pins("3").unwrap(), Pins(Some((3, None))));
        assert_eq!(pins("2,3").unwrap(), Pins(Some((2, Some(3)))));
        assert!(pins("2,x").unwrap_err().contains("`x`"));
    }

    #[test]
    fn times() {
        assert_eq!(seconds("0.5").unwrap(), Duration::from_millis(500));
        for bad in ["0", "-1", "nan", "inf", "x", "1e9"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
