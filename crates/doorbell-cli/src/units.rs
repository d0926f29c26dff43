//! Numbers for people: `1.25 M/s`, `31.4 GB/s`, `64 KiB`, `2.31 µs`, `1,048,576`.
//! Sizes are powers of 1024 (they are typed so), rates and times powers of 1000.
//! Nothing here is parsed back: the JSON carries the plain numbers.

/// A message size: `8 B`, `64 KiB`, `1 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

/// A rate per second with three significant figures and a decimal prefix: `18.3 M`.
pub(crate) fn scaled(value: f64) -> String {
    for (factor, unit) in [(1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")] {
        if value >= factor * 0.9995 {
            return format!("{}{unit}", three(value / factor));
        }
    }
    three(value)
}

/// Three significant figures, no exponent.
pub(crate) fn three(value: f64) -> String {
    if !value.is_finite() {
        "-".to_owned()
    } else if value >= 99.95 {
        format!("{value:.0}")
    } else if value >= 9.995 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

/// Nanoseconds as the unit that reads best: `85 ns`, `2.31 µs`, `1.20 ms`.
pub(crate) fn time(ns: f64) -> String {
    if ns < 999.5 {
        format!("{ns:.0} ns")
    } else if ns < 999_500.0 {
        format!("{} µs", three(ns / 1e3))
    } else if ns < 999_500_000.0 {
        format!("{} ms", three(ns / 1e6))
    } else {
        format!("{} s", three(ns / 1e9))
    }
}

/// A time-out or an age: as [`time`].
pub(crate) fn span(time: std::time::Duration) -> String {
    self::time(time.as_secs_f64() * 1e9)
}

/// An integer with thousands separated: `1,048,576`.
pub(crate) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_well() {
        assert_eq!(size(8), "8 B");
        assert_eq!(size(65_536), "64 KiB");
        assert_eq!(size(65_537), "65537 B");
        assert_eq!(size(1 << 20), "1 MiB");
        assert_eq!(scaled(18_300_000.0), "18.3 M");
        assert_eq!(scaled(999_900.0), "1.00 M");
        assert_eq!(scaled(0.0), "0.00");
        assert_eq!(scaled(31.4e9), "31.4 G");
        assert_eq!(time(85.0), "85 ns");
        assert_eq!(time(2310.0), "2.31 µs");
        assert_eq!(time(999.9), "1.00 µs");
        assert_eq!(time(1.2e6), "1.20 ms");
        assert_eq!(time(3e9), "3.00 s");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_048_576), "1,048,576");
        assert_eq!(three(f64::NAN), "-");
    }
}
