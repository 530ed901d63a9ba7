"""Bibliography entries. A class lists its papers in ``papers``; those that several classes share are defined here."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """One entry of a bibliography; its ``key`` is the first author, the year and a word of the title.

    >>> paper = Paper("abadi2016deep", "Abadi, Martin and others", "Deep learning with differential privacy", "CCS", arxiv="1607.00133")
    >>> paper.key, paper.arxiv
    ('abadi2016deep', '1607.00133')
    """

    key: str
    author: str
    title: str
    where: str = ""
    arxiv: str = ""
    kind: str = "inproceedings"

    @property
    def year(self) -> int:
        """The year, which the key names."""
        return int("".join(filter(str.isdigit, self.key)))

    def bibtex(self) -> str:
        """This paper as a BibTeX entry."""
        venue = {"inproceedings": "booktitle", "article": "journal"}.get(self.kind, "howpublished")
        fields = [("author", self.author), ("title", f"{{{self.title}}}"), ("year", str(self.year))]
        fields += [(venue, self.where)] if self.where else []
        fields += [("eprint", self.arxiv), ("archiveprefix", "arXiv")] if self.arxiv else []
        return f"@{self.kind}{{{self.key},\n" + "".join(f"  {name} = {{{value}}},\n" for name, value in fields) + "}"


ABADI_2016_DEEP = Paper(
    "abadi2016deep",
    "Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and Talwar, Kunal and Zhang, Li",
    "Deep Learning with Differential Privacy",
    "ACM CCS",
    arxiv="1607.00133",
)
BALLE_2018_IMPROVING = Paper(
    "balle2018improving",
    "Balle, Borja and Wang, Yu-Xiang",
    "Improving the {Gaussian} Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising",
    "ICML",
    arxiv="1805.06530",
)
BASSILY_2014_PRIVATE = Paper(
    "bassily2014private",
    "Bassily, Raef and Smith, Adam and Thakurta, Abhradeep",
    "Private Empirical Risk Minimization: Efficient Algorithms and Tight Error Bounds",
    "FOCS",
    arxiv="1405.7085",
)
CANONNE_2020_DISCRETE = Paper(
    "canonne2020discrete",
    "Canonne, Clement L. and Kamath, Gautam and Steinke, Thomas",
    "The Discrete {Gaussian} for Differential Privacy",
    "NeurIPS",
    arxiv="2004.00010",
)
CHOQUETTE_2023_AMPLIFIED = Paper(
    "choquette2023amplified",
    "Choquette-Choo, Christopher A. and others",
    "({Amplified}) Banded Matrix Factorization: A Unified Approach to Private Training",
    "NeurIPS",
    arxiv="2306.08153",
)
CHOQUETTE_2024_CORRELATED = Paper(
    "choquette2024correlated",
    "Choquette-Choo, Christopher A. and Dvijotham, Krishnamurthy and Pillutla, Krishna and others",
    "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning",
    "ICLR",
    arxiv="2310.06771",
)
DENISOV_2022_IMPROVED = Paper(
    "denisov2022improved",
    "Denisov, Sergey and McMahan, H. Brendan and Rush, Keith and Smith, Adam and Thakurta, Abhradeep",
    "Improved Differential Privacy for {SGD} via Optimal Private Linear Operators on Adaptive Streams",
    "NeurIPS",
    arxiv="2202.08312",
)
DWORK_2014_FOUNDATIONS = Paper(
    "dwork2014foundations",
    "Dwork, Cynthia and Roth, Aaron",
    "The Algorithmic Foundations of Differential Privacy",
    "Foundations and Trends in Theoretical Computer Science",
    kind="article",
)
KAIROUZ_2015_COMPOSITION = Paper(
    "kairouz2015composition",
    "Kairouz, Peter and Oh, Sewoong and Viswanath, Pramod",
    "The Composition Theorem for Differential Privacy",
    "ICML",
    arxiv="1311.0776",
)
KAIROUZ_2021_PRACTICAL = Paper(
    "kairouz2021practical",
    "Kairouz, Peter and McMahan, H. Brendan and Song, Shuang and Thakkar, Om and Thakurta, Abhradeep and Xu, Zheng",
    "Practical and Private (Deep) Learning without Sampling or Shuffling",
    "ICML",
    arxiv="2103.00039",
)
ZHANG_2024_DOPPLER = Paper(
    "zhang2024doppler",
    "Zhang, Xinwei and Bu, Zhiqi and Hong, Mingyi and Razaviyayn, Meisam",
    "{DOPPLER}: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction",
    "NeurIPS",
    arxiv="2408.13460",
)
